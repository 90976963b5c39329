"""Products of single pairs of rows, and sums of weighted rows, in plain PyTorch: the definition.

A trainer scores the ids of kept sets by products, and takes the gradients back by sums. Neither
makes a matrix of all ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpsample.backends.torch_.passes import tile_elements
from tpsample.core.exact_sum import MARGIN, exact_sums


def pair_products(left: Tensor, rows: Tensor, right: Tensor, columns: Tensor) -> Tensor:
    """Return the products [T] of pairs of rows: row rows[t] of `left`, row columns[t] of `right`.

    On a CPU a product is the exact dot product, rounded once to fp32, as in every backend. Numbers
    in float64 are not rounded, so that `torch.autograd.gradcheck` can move them by little.

    Args:
        left, right: [N, D] and [M, D], of one floating dtype.
        rows, columns: int64 [T].

    Returns:
        fp32; float64 of float64. An overflow is NaN, because it is no logit.
    """
    dtype = torch.float64 if right.dtype == torch.float64 else torch.float32
    products = left.new_empty(len(rows), dtype=dtype)
    for part in slices(len(rows), left.shape[1], tile_elements(left.device)):
        products[part] = _dots(left[rows[part]].double(), right[columns[part]].double(), dtype)
    return products.masked_fill_(products == torch.inf, torch.nan)


def add_weighted_rows(
    out: Tensor, ends: Tensor, factors: Tensor, source: Tensor, index: Tensor
) -> None:
    """Add to each row of `out` its part of weighted rows of `source`.

        out[i] += Σ factors[t] · source[index[t]],   ends[i] <= t < ends[i + 1]

    Args:
        out: float64 [n, D], contiguous.
        ends: int64 [n + 1], never falling.
        factors: float64 [T].
        source: [M, D], of any floating dtype.
        index: int64 [T].
    """
    first, last = ends[[0, -1]].tolist()
    rows = torch.arange(len(out), device=out.device).repeat_interleave(ends.diff())
    for part in slices(last - first, out.shape[1], tile_elements(out.device)):
        pairs = slice(first + part.start, first + part.stop)
        weighted = factors[pairs].unsqueeze(1) * source[index[pairs]].double()
        out.index_add_(0, rows[part], weighted)


def slices(count: int, size: int, at_once: int) -> Iterator[slice]:
    """Yield slices of `count` rows of so many numbers: one row each, or up to `at_once` numbers."""
    step = max(1, at_once // max(1, size))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def _dots(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot product of each pair of rows of float64 [P, D]."""
    products = left * right
    total = products.sum(dim=1)
    rounded = total.to(dtype)
    if dtype == torch.float64 or not total.is_cpu:
        return rounded
    error = left.norm(dim=1) * right.norm(dim=1) * (left.shape[1] * MARGIN)
    undecided = ((total - error).float() != (total + error).float()) & total.isfinite()
    rounded[undecided] = exact_sums(products[undecided])
    return rounded
