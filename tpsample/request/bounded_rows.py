"""Which filtered rows can do with few of their logits, whatever the others are.

A filter keeps the first tokens of an order, and top_p a share of the mass of what the others left.
So a row is bounded if all that it weighs lies among its first k tokens, k <= 256, or within min_p
of its first one:

                      top_k      min_p
    no top_p          bounds     bounds
    sequential        bounds     bounds
    joint             no         bounds     top_p is a share of what top_k cuts, too
    min_p_last        bounds     no         top_p is a share of what min_p cuts, too

One of them is enough. If both bound the row, what it weighs lies within both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tpsample.request.filters import MAX_TOP_WORDS, RowFilters
from tpsample.request.params import SamplingParams


def bounded_places(
    filtered: Sequence[int],
    asking: Collection[int],
    requests: Sequence[SamplingParams],
    vocab_size: int,
) -> list[int]:
    """Return the places, among the filtered rows of a batch, of those that are bounded.

    Args:
        asking: the rows that ask for logprobs, which need their other logits too.
    """
    return [
        place
        for place, row in enumerate(filtered)
        if row not in asking and _is_bounded(requests[row], vocab_size)
    ]


def _is_bounded(request: SamplingParams, vocab_size: int) -> bool:
    top_k = 0 < request.top_k <= MAX_TOP_WORDS and request.top_k < vocab_size
    if request.top_p < 1:
        top_k &= request.filter_order != "joint"
        min_p = request.min_p > 0 and request.filter_order != "min_p_last"
        return top_k or min_p
    return top_k or request.min_p > 0


def row_bounds(filters: RowFilters, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return what bounds each row: int64 [F], k or 0, and float64 [F], ln(min_p) or -inf."""
    whole = filters.top_p >= 1
    by_top_k = (filters.top_k <= MAX_TOP_WORDS) & (filters.top_k < vocab_size)
    by_top_k &= whole | ~filters.joint
    by_min_p = whole | (filters.total_log_min_p > -torch.inf)
    return filters.top_k * by_top_k, filters.log_min_p.where(by_min_p, -torch.inf)
