"""Samples from kept sets while the host reads nothing, as a captured CUDA graph must.

The tokens are those of `tpsample.logits.filters`, by the same three ways, but what a step launches
follows from its requests alone:

1. Rows that go by top words are decided by one exchange.
2. The other rows go by rejection. Its kernels leave each row's `decided` on the device.
3. What it leaves goes by the threshold. Every launch and every exchange is made, whatever the
   logits, but a program whose row is decided ends at once, and its integers are zero.

A step leaves out each of the three that none of its requests can need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.logits.cut import find_cut, find_top_k_cut
from tpsample.logits.filters import BEST_SCORES, by_top_words
from tpsample.logits.shard_logits import ShardLogits
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, Way


def sample_in_fixed_rounds(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Return what `sample_filtered` does: int64 [F, num_samples], the same on every rank.

    Collective. The number of exchanges and their sizes follow from the requests.
    """
    few = [
        top_k
        for top_k, way in zip(filters.top_k_list, filters.ways, strict=True)
        if way is Way.TOP_WORDS
    ]
    if not few:
        return _by_rejection_then_threshold(rows, filters, ranks)
    if len(few) == len(filters.kinds):
        return by_top_words(rows, filters, max(few), ranks)
    is_few = filters.by_top_words
    words = by_top_words(rows.without(~is_few), filters, max(few), ranks)
    others = filters.beyond_top_words(rows.vocab_size)
    found = _by_rejection_then_threshold(rows.without(is_few), others, ranks)
    return torch.where(is_few.unsqueeze(1), words, found)


def _by_rejection_then_threshold(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Tensor:
    """Return words [F, num_samples]. Rows that are done mean nothing, and are not searched."""
    gathered = ranks.gather_integers(rows.best_scores(BEST_SCORES))
    top_k_cut = total_cut = None
    if Way.REJECTION_IN_TOP_K in filters.ways:
        # The threshold takes it too, so it is searched for all rows that have top_k.
        has_top_k = filters.top_k < rows.vocab_size
        found = find_top_k_cut(rows.without(~has_top_k), filters, _top(gathered), ranks)
        top_k_cut = torch.where(has_top_k, found, 0)
        total_cut = torch.where(filters.in_top_k, top_k_cut, 0)
    sums = ranks.sum_integers(rows.before(gathered, filters, BEST_SCORES, total_cut))
    words, decided = rows.first_kept(gathered, sums, filters, BEST_SCORES)

    left = rows.without(decided)
    cut = find_cut(left, filters, _top(gathered), ranks, top_k_cut=top_k_cut, total=sums[:, -1])
    best = ranks.gather_integers(left.best_kept(cut)).amax(dim=0)
    return torch.where(decided.unsqueeze(1), words, best)


def _top(gathered: Tensor) -> Tensor:
    """Return fp32 [F], the largest logits, of the `best_scores` of all ranks."""
    return word.value_of(gathered[:, :, 0].amax(dim=0))
