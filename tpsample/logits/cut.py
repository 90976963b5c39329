"""Finds the last token of a kept set on vocabulary shards by radix search: exact and bounded.

Each filter keeps a prefix of the total order, which ends at one order word, its cut. The kept set
goes down to the largest of the cuts. That of min_p follows from the largest logit. That of top_k is
where the number of tokens reaches k, that of top_p where their mass reaches its limit. These two
are found digit by digit from the top: the ranks sum a histogram of the next digit's weights, 64
integers per row, and the cut has the digit in which the running sum reaches the limit. A word has
52 bits, so the search ends after nine rounds, whatever the logits. Larger digits take fewer rounds
and more bytes: 8 bits would be seven rounds of four times the size.

The histograms are those of radix select. The host never reads the device here, because the number
of rounds is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import DIGIT_BITS, mass_limit
from tpsample.logits.candidates import Candidates, Search
from tpsample.logits.shard_logits import ShardLogits
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters


def find_cut(
    rows: ShardLogits,
    filters: RowFilters,
    top: Tensor,
    ranks: Ranks,
    *,
    top_k_cut: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Return int64 [F], where each kept set ends: a token is kept iff its order word is >= it.

    A row with a NaN, or with nothing but masked tokens, keeps nothing. A greedy row has no filters.
    Collective: the ranks search once if a row has top_k and once if a row has top_p, which the
    requests alone decide.

    Args:
        rows: the logits of the filtered rows on this rank.
        filters: their filters; the same on every rank.
        top: fp32 [F], largest logits over all ranks.
        top_k_cut: what `find_top_k_cut` has found, or 0 in rows without top_k; None to search.
        total: int64 [F], the masses of which top_p is a share, over all ranks; None to sum them.
    """
    candidates = rows.candidates(top)
    min_p_cut = rows.min_p_cut(top, filters.log_min_p)
    if top_k_cut is None:
        top_k_cut = torch.zeros_like(min_p_cut)
        if min(filters.top_k_list) < rows.vocab_size:
            top_k_cut = _cut_of_top_k(candidates, filters, ranks)
    cut = min_p_cut.maximum(top_k_cut)
    if min(filters.top_p_list) < 1:
        if total is None:
            total_cut = torch.where(filters.joint, 0, top_k_cut)
            min_p_first = filters.total_log_min_p > -torch.inf
            total_cut = torch.where(min_p_first, total_cut.maximum(min_p_cut), total_cut)
            total = ranks.sum_integers(candidates.mass_from(total_cut))
        limit = mass_limit(total, filters.top_p)
        top_p_cut = _weighted_cut(candidates, limit, filters, ranks, mass=True)
        cut = torch.where(filters.top_p < 1, cut.maximum(top_p_cut), cut)
    # A row that was made greedy by its temperature alone keeps what a mask leaves.
    unfiltered = torch.where(min_p_cut < 1 << word.EPOCH_SHIFT, word.LOWEST_DRAWABLE, min_p_cut)
    return torch.where(rows.noise.random.squeeze(1), cut, unfiltered)


def find_top_k_cut(rows: ShardLogits, filters: RowFilters, top: Tensor, ranks: Ranks) -> Tensor:
    """Return int64 [F], the last word that top_k leaves. Collective.

    It is the cheaper half of `find_cut`, because a histogram of numbers takes 32 bits per bin.
    """
    return _cut_of_top_k(rows.candidates(top), filters, ranks)


def _cut_of_top_k(candidates: Candidates, filters: RowFilters, ranks: Ranks) -> Tensor:
    return _weighted_cut(candidates, filters.top_k, filters, ranks, mass=False)


def _weighted_cut(
    candidates: Candidates,
    limit: Tensor,
    filters: RowFilters,
    ranks: Ranks,
    *,
    mass: bool,
) -> Tensor:
    """Return the word at which the weight of descending words of all ranks reaches `limit`.

    With ties="keep" it is the last word of the same logit.

    Args:
        limit: int64 [F] >= 1. A limit above the row's whole weight stands for the whole.
        mass: whether a token's weight is its mass, or one.
    """
    search = Search(torch.zeros_like(limit), torch.zeros_like(limit), limit)
    for shift in range(word.EPOCH_SHIFT // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        bins = ranks.sum_integers(candidates.digits(search.prefix, shift, mass=mass))
        search = candidates.next_digit(search, bins)
    cut = search.prefix
    return torch.where(filters.keep_ties, cut & ~word.TOKEN_MASK, cut)
