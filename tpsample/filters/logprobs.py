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
from tpsample.core.row_noise import has_all
from tpsample.filters.kept_sets import Cut, find_cut
from tpsample.output import Logprobs
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import LogprobRows


def own_words(
    rows: ShardLogits, logprob_rows: LogprobRows, sampled: Tensor, first: Tensor | None = None
) -> Tensor:
    """Return what a rank sends for logprobs, int64 [R, n + S + C]: words of its first n tokens, and
    of the sampled and chosen ids that it owns.

    Args:
        sampled: int64 [R, S]; -1 for none.
        first: n first words of the rows, or more, if they are known.
    """
    ids = (
        torch.cat([sampled, logprob_rows.chosen], dim=1)
        if logprob_rows.chosen.shape[1]
        else sampled
    )
    return rows.own_words(max(1, logprob_rows.top), ids, first)


def words_of_drawn(gathered: Tensor, logprob_rows: LogprobRows, sampled: Tensor) -> Tensor:
    """Return the `own_words` of all ranks, where each sent its best tokens for the drawn ones."""
    best = gathered[:, :, max(1, logprob_rows.top) :][..., : sampled.shape[1]]
    best *= word.token_of(best) == sampled  # the rank of the drawn token has its word
    return gathered


def words_of_first(cut: Cut, logprob_rows: LogprobRows) -> Tensor:
    """Return the `own_words` of all ranks together, where first words hold all of them."""
    assert cut.first is not None and cut.drawn is not None
    return torch.cat([cut.first[:, : max(1, logprob_rows.top)], cut.drawn], dim=1)[None]


def logprobs_of_sets(
    rows: ShardLogits, logprob_rows: LogprobRows, sampled: Tensor, cut: Cut
) -> Logprobs:
    """Return processed logprobs of rows whose first words hold their kept sets. Nothing is sent.

    Args:
        rows, logprob_rows, sampled: as in `find_logprobs`. No row is greedy or asks for chosen ids.
        cut: of all asking rows, in the same order.
    """
    assert cut.first is not None and cut.drawn is not None
    words, sums = rows.weighed_words(logprob_rows, cut.first, cut.drawn, cut.words)
    return rows.logprobs_of_words(logprob_rows, sampled, words, cut.words, sums)


def find_logprobs(
    rows: ShardLogits,
    logprob_rows: LogprobRows,
    sampled: Tensor,
    ranks: Ranks,
    *,
    may_read: bool,
    ends: Tensor | None = None,
    gathered: Tensor | None = None,
    first: Tensor | None = None,
) -> Logprobs:
    """Return logprobs of the asking rows, equal on every rank. Collective.

    Args:
        rows: the R asking rows.
        logprob_rows: what they ask for.
        sampled: int64 [R, S], the tokens drawn, or the next tokens of a prompt; -1 for none. A row
            without a token, with a NaN, or with only masked tokens has ids -1, values NaN and
            ranks 0. In the raw modes the same holds of the raw logits.
        may_read: as `find_cut` takes it.
        ends: int64, where the logprobs of the batch's filtered rows end; None to find it.
        gathered: the `own_words` of all ranks, or of all merged into one; None to gather them.
        first: as in `own_words`.
    """
    if gathered is None:
        gathered = ranks.gather_integers(own_words(rows, logprob_rows, sampled, first))
    words = rows.listed_words(logprob_rows, gathered)
    cut: Tensor | None = None
    marks = words.marks
    if logprob_rows.filters is not None and logprob_rows.filtered is not None:
        filtered = logprob_rows.filtered
        if ends is None:
            filtered_rows = replace(rows, top=words.top).select(filtered)
            cut = find_cut(filtered_rows, logprob_rows.filters, ranks, may_read=may_read).words
        else:
            cut = ends[logprob_rows.of_filters]
        if not has_all(filtered, len(marks)):
            of_all = torch.zeros_like(marks[:, 0])
            of_all[filtered] = cut
            cut = of_all
        if logprob_rows.asks is not None or not all(logprob_rows.processed_list):
            cut = torch.where(logprob_rows.processed, cut, 0)
        marks = marks.maximum(cut.unsqueeze(1))

    rows = replace(rows, top=words.top, temperature=words.temperature)
    sums = ranks.sum_integers(rows.weigh(cut, marks))
    return rows.logprobs_of_words(logprob_rows, sampled, words, cut, sums)
