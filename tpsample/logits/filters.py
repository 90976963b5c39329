"""Sampling from kept sets on vocabulary shards: exact, and no logit leaves its rank.

A row's token is the best score in its kept set. Three ways to it, chosen per row by what the host
knows of the request; all give the token of `tpsample.reference`:

rejection    The first token in descending score that is in the kept set. Whether a token is needs
             only its logit, and the number and the mass of the tokens before it. Exchange 1 gathers
             each rank's 8 best scores; exchange 2 sums, for the 8 best of all, number and mass over
             the shards. If none of the 8 is kept the row takes a second round.
             A top_p of what a top_k over 256 leaves, or one with ties, renormalises over tokens too
             many to send: between the two exchanges a radix search for the last of them finds
             their mass.
top words    Each rank sends its first k tokens of the order; the first k of these are the first k
             of the vocabulary, with which every rank finishes alone. One exchange, for k <= 256:
             rows with top_k and a top_p of what it leaves, which renormalises over these tokens
             alone, and the second round of rows with top_k but no top_p. Exact ties only.
threshold    Radix search for the last kept token (`threshold`), then the best score down
             to it. A fixed number of exchanges, whatever the logits: what no other way decides.

Which rows a second round is for, the host reads from the device, the same on every rank because
it follows from summed integers. A captured graph cannot look, so there every row goes by the
threshold alone: what decides any row in a fixed number of rounds needs no first round before it.

Scores restricted to any set are Gumbel-max over that set, so the first member is an exact draw from
the filtered softmax. FlashInfer's sorting-free rejection sampling draws anew instead; here one draw
of noise per token id serves, which makes the result independent of the number of rounds.
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
rows with top_p, or with top_k = 50."""


def sample_filtered(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    fixed_rounds: bool = False,
) -> Tensor:
    """The winning score words of filtered rows, int64 [F, num_samples], the same on every rank.

    Collective. A row with a NaN gives a NaN's word and one without an unmasked token gives 0, so
    `word.decode` yields token and status.

    Args:
        fixed_rounds: every row by the threshold; the host reads nothing from the device.
    """
    if fixed_rounds:
        return _by_threshold(rows, filters, ranks)
    words = rows.logits.new_empty(len(filters), rows.noise.num_samples, dtype=torch.int64)
    todo = filters.by_way(filters.first_way)

    for way in (Way.REJECTION, Way.REJECTION_IN_TOP_K):
        if not (index := todo[way]):
            continue
        part, part_filters = rows.select(index), filters.select(index)
        in_top_k = way is Way.REJECTION_IN_TOP_K
        found, decided = _by_rejection(part, part_filters, ranks, in_top_k=in_top_k)
        words = _put(words, index, found)
        for row, done in zip(index, decided.tolist(), strict=True):
            if not done:
                todo[filters.second_way[row]].append(row)
    for way, sample in ((Way.TOP_WORDS, _by_top_words), (Way.THRESHOLD, _by_threshold)):
        if index := todo[way]:
            found = sample(rows.select(index), filters.select(index), ranks)
            words = _put(words, index, found)
    return words


def _put(words: Tensor, index: list[int], found: Tensor) -> Tensor:
    """`words` with those of some rows; without a copy from the host if these are all in order."""
    if lists_all(index, len(words)):
        return found
    words[index] = found
    return words


def _by_rejection(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, *, in_top_k: bool
) -> tuple[Tensor, Tensor]:
    """Words [F, num_samples], and bool [F]: whether they decide the row.

    Args:
        in_top_k: the mass of which top_p is a share ends where top_k does.
    """
    gathered = ranks.gather_integers(rows.leading(BEST_SCORES))
    cut = None
    if in_top_k:
        top = word.value_of(gathered[:, :, 0].amax(dim=0))
        cut = find_top_k_cut(rows, filters, top, ranks)
    sums = ranks.sum_integers(rows.before(gathered, filters, BEST_SCORES, cut))
    return rows.first_kept(gathered, sums, filters, BEST_SCORES)


def _by_top_words(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Words [F, num_samples] from the first k tokens of the order."""
    count = max(filters.top_k_list)
    gathered = ranks.gather_integers(rows.first_words(count))  # [W, F, count]
    first = gathered.transpose(0, 1).flatten(1).topk(count, dim=1).values
    return rows.best_of_first(first, filters)


def _by_threshold(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Words [F, num_samples]: the best scores down to the last kept token."""
    top_word = ranks.gather_integers(rows.first_words(1)).amax(dim=0).squeeze(1)
    cut = find_cut(rows, filters, word.value_of(top_word), ranks)
    best = ranks.gather_integers(rows.best_kept(cut)).amax(dim=0)
    return or_nan(best, top_word)
