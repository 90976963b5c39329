"""Log-probabilities on vocabulary shards: the sampled token, the top N, chosen ids; no gather.

    raw_logits            x_v
    raw_logprobs          x_v - max x - ln(Σ e^(x - max x))
    processed_logits      x_v / T in the kept set, -inf outside; T is 1 in a greedy row
    processed_logprobs    (x_v - max x) / T - ln(Z),  Z the mass of the kept set
    entropy               ln(Z) + ln 2 · Σ m_v / Z    of the same distribution

Each rank finds its own best words, answers for the ids it owns, counts, and sums. It sums integer
masses and moments (`tpsample.core.masses`), so any number of ranks returns the same bits. A sum of
V masses is off by at most max(2^-22, 0.51 V · 2^-40) of it, hence a logprob by at most 5e-7; the
rest is float64.

Names and the rank (how many logits are greater than or equal to a token's own) are vLLM's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.masses import LN2, TOP_MASS
from tpsample.core.order import below_top
from tpsample.filters.kept_sets import find_cut
from tpsample.output import Logprobs
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import LogprobRows


def find_logprobs(rows: ShardLogits, asked: LogprobRows, sampled: Tensor, ranks: Ranks) -> Logprobs:
    """Return logprobs of the asking rows, equal on every rank. Collective.

    Args:
        rows: the R asking rows.
        asked: what they ask for.
        sampled: int64 [R, S], the tokens drawn, or those that came; -1 for none. A row without a
            token, with a NaN, or with nothing but masked tokens has ids -1, values NaN and ranks 0.
    """
    gathered = ranks.gather_integers(rows.first_words(max(1, asked.top)))
    first = gathered.transpose(0, 1).flatten(1).topk(max(1, asked.top), dim=1).values
    top = word.value_of(first[:, 0])
    rows = replace(rows, top=top)
    status = word.decode(first[:, :1])[1]
    own = ranks.sum_integers(rows.words_of(torch.cat([sampled, asked.chosen], dim=1)))

    cut = torch.zeros_like(first[:, 0])
    if asked.filters is not None and asked.filtered is not None:
        cut[asked.filtered] = find_cut(rows.select(asked.filtered), asked.filters, ranks)
        cut = torch.where(asked.processed, cut, 0)  # where only some rows may be processed

    temperature = torch.where(asked.processed, rows.temperature, 1.0)
    sums = ranks.sum_integers(replace(rows, temperature=temperature).mass_from(cut)).double()
    log_total = (sums[:, :1] / TOP_MASS).log()
    entropies = log_total.squeeze(1) + LN2 * (sums[:, 1] / sums[:, 0])

    # Ranks of the N best follow from their own order, but for what ties with the last of them.
    # The kept set is a prefix, so no rank in it exceeds its size.
    marks = torch.cat([own, first[:, -1:]], dim=1)
    greater_or_equal = ranks.sum_integers(
        rows.count_from(_lowest_tie(marks).maximum(cut.unsqueeze(1)))
    )
    keys = word.key_of(first)
    rank_in_first = torch.searchsorted(-keys, -keys, right=True)
    rank_in_first = rank_in_first.minimum((first >= cut.unsqueeze(1)).sum(dim=1, keepdim=True))
    ties_with_last = keys == keys[:, -1:]
    rank_in_first = torch.where(ties_with_last, greater_or_equal[:, -1:], rank_in_first)

    drawn, listed = sampled.shape[1], first[:, : asked.top]
    words = torch.cat([own[:, :drawn], listed, own[:, drawn:]], dim=1)
    token_ranks = torch.cat(
        [greater_or_equal[:, :drawn], rank_in_first[:, : asked.top], greater_or_equal[:, drawn:-1]],
        dim=1,
    )
    logits = word.value_of(words)
    below = below_top(logits, top.unsqueeze(1), temperature.unsqueeze(1))
    values = torch.where(
        asked.as_logits.unsqueeze(1), logits.double() / temperature.unsqueeze(1), below - log_total
    )
    kept = words >= cut.unsqueeze(1)
    token_ranks = torch.where(kept, token_ranks, rows.vocab_size)

    wanted = torch.arange(asked.top, device=words.device) < asked.top_of.unsqueeze(1)
    asked_for = torch.cat([sampled >= 0, wanted, asked.chosen >= 0], dim=1)
    has_values = (status == word.Status.OK) & (sampled >= 0).all(dim=1, keepdim=True)
    asked_for &= has_values
    return Logprobs(
        token_ids=word.token_of(words).where(asked_for, word.NO_TOKEN),
        values=values.where(kept, -torch.inf).where(asked_for, torch.nan),
        ranks=token_ranks.where(asked_for, 0),
        entropies=entropies.where(has_values.squeeze(1), torch.nan),
    )


def _lowest_tie(words: Tensor) -> Tensor:
    """Return the smallest word of the same logit."""
    return words & ~word.TOKEN_MASK
