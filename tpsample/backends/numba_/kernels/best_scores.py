"""The decisions of best scores about filtered rows. Twins: `words_of`, `before` and `first_kept` of
`tpsample.backends.torch_.passes`."""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, I64, jit
from tpsample.backends.numba_.kernels.masses import mass_limit, mass_row, power_of, rounded
from tpsample.backends.numba_.kernels.numbers import key_of, pack, value_of
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.core.word import KEY_MINUS_INF, KEY_NAN, LOWEST_DRAWABLE, TOKEN_BITS


@jit()
def mark_of(orders, first, c):
    """Return an order word of best scores, 0 if one with a better score comes before it.

    Args:
        orders: int64, the order words of a row.
        first: the index of the best score of the sample that index c is of.
    """
    for better in range(first, c):
        if orders[better] > orders[c]:
            return I64(0)
    return orders[c]


@jit(entry=True)
def words_of(logits, first_id, token_ids, out):
    """Find the order words of ids, 0 for those of other ranks and for -1.

    Args:
        logits: fp32 [F, V_local], of the ids from first_id on.
        token_ids, out: int64 [F, C].
    """
    for i in range(len(logits)):
        for c in range(token_ids.shape[1]):
            v = token_ids[i, c] - first_id
            is_own = 0 <= v < logits.shape[1]
            out[i, c] = pack(logits[i, v], token_ids[i, c]) if is_own else I64(0)


@jit(entry=True)
def edges_of(best, least_of_total, count, top, edges):
    """Find the logits between which upper ends are weighed.

    Args:
        best: int64 [F, 1 + 2 C], those of all ranks, `count` for each sample.
        least_of_total: int64 [F]; see `tpsample.request.filters.Thresholds`.
        top: fp32 [F], largest logits.
        edges: fp32 [F, C + 1], logits of the best scores, inf if they decide nothing, and of the
            last word of the total.
    """
    num_marks = edges.shape[1] - 1
    for i in range(len(best)):
        top[i], orders = value_of(best[i, 0]), best[i, 1 + num_marks :]
        for c in range(num_marks):
            mark = mark_of(orders, c - c % count, c)
            edges[i, c] = value_of(mark) if mark else F32(np.inf)
        least = least_of_total[i]
        edges[i, num_marks] = value_of(least) if least > LOWEST_DRAWABLE else F32(-np.inf)


@jit(entry=True)
def first_kept(best, sums, count, temperature, limits, bounded, words, decided, top):
    """Find the first of the best scores of each row that is in its kept set.

    Args:
        best, count, top: as `edges_of` takes them.
        sums: int64 [F, 2 C + 1], those of `ShardLogits.before`; with `bounded` [F, 2 (C + 1)] or
            [F, 4 (C + 1)], those of `ends.bound_sums` of the best scores and of the total.
        temperature: fp32 [F].
        limits: most, share and least of `tpsample.request.filters.Thresholds`, [F] each.
        words: int64 [F, samples].
        decided: bool [F], whether the words are those that the filters keep.
    """
    most, shares, leasts = limits
    num_marks, samples = (best.shape[1] - 1) // 2, words.shape[1]
    counts = sums.shape[1] > 2 * (num_marks + 1)
    for i in range(len(best)):
        orders, of_row, key = best[i, 1 + num_marks :], sums[i], key_of(best[i, 0])
        top[i] = value_of(best[i, 0])
        mass_numbers = mass_row(top[i], temperature[i])
        at_least = of_row[num_marks] if bounded else of_row[2 * num_marks]
        at_most = of_row[2 * num_marks + 1] if bounded else at_least
        low, high = mass_limit(at_least, shares[i]), mass_limit(at_most, shares[i])
        decided[i] = True
        for sample in range(samples):
            sure_word, word, first = I64(0), I64(0), sample * count
            for c in range(first, first + count):
                mark = mark_of(orders, first, c)
                if mark < leasts[i] or mark == 0:
                    continue
                before, number = of_row[c], of_row[num_marks + c]
                sure = possible = before < low and number < most[i]
                if bounded:
                    # The upper bound counts a mark as before itself.
                    power, _, _ = power_of(value_of(mark), mass_numbers)
                    sure = of_row[num_marks + 1 + c] - rounded(power) < low
                    possible = before < high
                    if counts:
                        possible &= of_row[2 * (num_marks + 1) + c] < most[i]
                        sure &= of_row[3 * (num_marks + 1) + c] <= most[i]
                score = best[i, 1 + c]
                sure_word = larger(sure_word, score if sure else I64(0))
                word = larger(word, score if possible else I64(0))
            decided[i] &= word > 0 and word == sure_word
            words[i, sample] = word
        decided[i] |= key <= KEY_MINUS_INF or key == KEY_NAN
        if top[i] != top[i]:
            words[i] = I64(KEY_NAN) << I64(TOKEN_BITS)
