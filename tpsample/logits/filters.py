"""Samples from kept sets on vocabulary shards, exactly, while no logit leaves its rank.

A row's token is the best score in its kept set. Its request says by which of two ways it is found,
and a row that the second way does not decide takes the third. All return the token of
`tpsample.reference`:

top words    sends each rank's first k tokens of the order. The first k of these are the first k of
             the vocabulary, with which every rank finishes alone, after one exchange. It serves
             top_k <= 256 with exact ties, alone or with a top_p of what it leaves.
rejection    takes the first token in descending score that is in the kept set. Whether a token is
             in it follows from its logit, and from the number and the mass of the tokens before it.
             Exchange 1 gathers each rank's 8 best scores. Exchange 2 sums number and mass over the
             shards, for the 8 best of all. If none of the 8 is kept, the row is undecided.
             A top_p of what a top_k over 256 leaves, or one with ties, renormalises over too many
             tokens to send, so between the two exchanges a radix search finds their mass.
threshold    searches for the last kept token (`tpsample.logits.cut`), then takes the best score
             down to it. It takes as many exchanges whatever the logits.

The host reads from the device which rows are undecided. All ranks read the same, because it
follows from summed integers. While a graph is captured the host cannot read; then
`tpsample.logits.fixed_rounds` takes the place of this file.

The best score of a set is a Gumbel-max draw from that set, so the first member is an exact draw
from the filtered softmax. FlashInfer's sorting-free rejection sampling draws anew in every round;
here one draw of noise per token id serves, so the number of rounds cannot change the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.logits.cut import find_cut, find_top_k_cut
from tpsample.logits.shard_logits import ShardLogits, or_nan
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, Way, lists_all

BEST_SCORES = 8
"""Candidates of the rejection. On real logits at T = 1 none of 8 was kept for fewer than 0.3 % of
rows with top_p."""


def sample_filtered(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Return the winning score words of filtered rows, int64 [F, num_samples], on every rank.

    Collective. `word.decode` makes tokens and status of them, because a row with a NaN has a NaN's
    word, and a row without an unmasked token has 0.
    """
    words = rows.logits.new_empty(len(filters), rows.noise.num_samples, dtype=torch.int64)
    todo, undecided = filters.by_way(), []

    if index := todo[Way.TOP_WORDS]:
        part = filters.select(index)
        found = by_top_words(rows.select(index), part, max(part.top_k_list), ranks)
        words = _put(words, index, found)
    for way in (Way.REJECTION, Way.REJECTION_IN_TOP_K):
        if not (index := todo[way]):
            continue
        in_top_k = way is Way.REJECTION_IN_TOP_K
        found, decided = _by_rejection(
            rows.select(index), filters.select(index), ranks, in_top_k=in_top_k
        )
        words = _put(words, index, found)
        undecided += [row for row, done in zip(index, decided.tolist(), strict=True) if not done]
    ranks.counters.second_rounds += len(undecided)
    if undecided:
        found = _by_threshold(rows.select(undecided), filters.select(undecided), ranks)
        words = _put(words, undecided, found)
    return words


def _put(words: Tensor, index: list[int], found: Tensor) -> Tensor:
    """Put words of some rows in place. Nothing is copied if these are all rows in order."""
    if lists_all(index, len(words)):
        return found
    words[index] = found
    return words


def _by_rejection(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, *, in_top_k: bool
) -> tuple[Tensor, Tensor]:
    """Return words [F, num_samples], and bool [F], whether they decide the row.

    Args:
        in_top_k: whether the mass of which top_p is a share ends where top_k does.
    """
    gathered = ranks.gather_integers(rows.best_scores(BEST_SCORES))
    cut = None
    if in_top_k:
        top = word.value_of(gathered[:, :, 0].amax(dim=0))
        cut = find_top_k_cut(rows, filters, top, ranks)
    sums = ranks.sum_integers(rows.before(gathered, filters, BEST_SCORES, cut))
    return rows.first_kept(gathered, sums, filters, BEST_SCORES)


def by_top_words(rows: ShardLogits, filters: RowFilters, count: int, ranks: Ranks) -> Tensor:
    """Return words [F, num_samples], from the first k tokens of the order. Collective.

    Args:
        count: at least the top_k of every row that is not done.
    """
    gathered = ranks.gather_integers(rows.first_words(count))  # [W, F, count]
    first = gathered.transpose(0, 1).flatten(1).topk(count, dim=1).values
    return rows.best_of_first(first, filters)


def _by_threshold(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Return words [F, num_samples], the best scores down to the last kept token."""
    top_word = ranks.gather_integers(rows.first_words(1)).amax(dim=0).squeeze(1)
    cut = find_cut(rows, filters, word.value_of(top_word), ranks)
    best = ranks.gather_integers(rows.best_kept(cut)).amax(dim=0)
    return or_nan(best, top_word)
