"""Ids, values and ranks of logprobs. Twin: `tpsample.backends.torch_.logprobs`."""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I64, jit
from tpsample.backends.numba_.kernels.decode import OK, token_of
from tpsample.backends.numba_.kernels.heap import push, sort
from tpsample.backends.numba_.kernels.numbers import key_of, value_of
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.core.masses import LN2
from tpsample.core.word import NO_TOKEN, TOKEN_MASK


@jit(entry=True)
def list_words(gathered, given, processed, first, own, marks, top, temperature):
    """Find the words of all ranks that logprobs are told of. Twin: `listed_words`.

    Args:
        gathered: int64 [W, R, n + S + C], each rank's first words and those of some ids.
        given: fp32 [R], temperatures; processed: bool [R], whether they count.
        first, own, marks, top, temperature: out, as in `ListedWords`; `first` are zeros.
    """
    count, num_own = first.shape[1], own.shape[1]
    for i in range(len(first)):
        for rank in range(len(gathered)):
            for j in range(count):
                push(first[i], count, gathered[rank, i, j])
        sort(first[i])
        for c in range(num_own):
            word = gathered[0, i, count + c]
            for rank in range(1, len(gathered)):
                word = larger(word, gathered[rank, i, count + c])
            own[i, c], marks[i, c] = word, word & ~I64(TOKEN_MASK)
        marks[i, num_own] = first[i, count - 1] & ~I64(TOKEN_MASK)
        top[i] = value_of(first[i, 0])
        temperature[i] = given[i] if processed[i] else F32(1)


@jit(entry=True)
def told_logprobs(words, asked, cut, sums, log_total, vocab_size, token_ids, values, ranks, means):
    """Find ids, values and ranks of the sampled, the first and the chosen tokens, and entropies.

    Args:
        words: `first`, `own`, `top` and `temperature` of `ListedWords`.
        asked: int64 [R, S] of sampled ids, [R, C] of chosen ones, [R] of how many of the first;
            bool [R], whether logits are told.
        cut: int64 [R], the lowest word of each kept set, 0 in a raw mode.
        sums: int64 [R, 2 + S + C + 1], as `logprobs_of_words` takes them.
        log_total: float64 [R], ln(Z).
        token_ids, ranks: int64 [R, S + N + C]; values: float64.
        means: float64 [R], the entropies.
    """
    first, own, top, temperature = words
    sampled, chosen, top_of, as_logits = asked
    count, num_drawn, num_chosen = first.shape[1], sampled.shape[1], chosen.shape[1]
    num_top, num_own = token_ids.shape[1] - num_drawn - num_chosen, num_drawn + num_chosen
    for i in range(len(first)):
        of_row, last = sums[i, 2:], key_of(first[i, count - 1])
        _, status = token_of(first[i, 0])
        has_values, num_kept = status == OK, 0
        for j in range(num_drawn):
            has_values &= sampled[i, j] >= 0
        for j in range(count):
            num_kept += first[i, j] >= cut[i]
        temperature64, rank = F64(temperature[i]), count
        for place in range(token_ids.shape[1] - 1, -1, -1):
            of_top = place - num_drawn
            if of_top < 0 or of_top >= num_top:
                of_own = place if of_top < 0 else place - num_top
                word, its_rank = own[i, of_own], of_row[of_own]
                wanted = of_top < 0 or chosen[i, of_own - num_drawn] >= 0
            else:
                word, wanted = first[i, of_top], of_top < top_of[i]
                # As many words have no lower key as stand up to the last of the same key.
                if of_top + 1 == count or key_of(word) != key_of(first[i, of_top + 1]):
                    rank = of_top + 1
                its_rank = of_row[num_own] if key_of(word) == last else smaller(rank, num_kept)
            kept, logit = word >= cut[i], value_of(word)
            wanted &= has_values
            value = 0.0 if logit == top[i] else (F64(logit) - F64(top[i])) / temperature64
            value = F64(logit) / temperature64 if as_logits[i] else value - log_total[i]
            value = value if kept else -np.inf
            values[i, place] = value if wanted else np.nan
            token_id = I64(TOKEN_MASK) - (word & I64(TOKEN_MASK))
            token_ids[i, place] = token_id if wanted else I64(NO_TOKEN)
            ranks[i, place] = (its_rank if kept else vocab_size) if wanted else 0
        entropy = log_total[i] + LN2 * (F64(sums[i, 1]) / F64(sums[i, 0]))
        means[i] = entropy if has_values else np.nan
