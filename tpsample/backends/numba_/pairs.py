"""Products of single pairs of rows, and sums of weighted rows, in native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.numba_.kernels import pairs as kernels
from tpsample.backends.numba_.kernels.arrays import arrays_of
from tpsample.backends.numba_.kernels.inputs import weight_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.backends.torch_ import pairs as plain
from tpsample.core.weight_format import FORMATS


def pair_products(left: Tensor, rows: Tensor, right: Tensor, columns: Tensor) -> Tensor:
    """Return the products of pairs of rows. Twin: `tpsample.backends.torch_.pairs`."""
    if not (_may_read(left) and _may_read(right)):
        return plain.pair_products(left, rows, right, columns)
    products, size = left.new_empty(len(rows), dtype=torch.float32), left.shape[1]
    given = weight_of(left, 0, 0, 0), rows, weight_of(right, 0, 0, 0), columns, size, products
    threads = threads_for(len(rows) * size)
    in_ranges(kernels.pair_products, 0, len(rows), threads, *arrays_of(given))
    return products


def add_weighted_rows(
    out: Tensor, ends: Tensor, factors: Tensor, source: Tensor, index: Tensor
) -> None:
    """Add weighted rows to rows. Twin: `tpsample.backends.torch_.pairs`."""
    if not _may_read(source):
        return plain.add_weighted_rows(out, ends, factors, source, index)
    given = out, ends, factors, weight_of(source, 0, 0, 0), index
    threads = min(len(out), threads_for(int(ends[-1] - ends[0]) * out.shape[1]))
    in_ranges(kernels.add_weighted_rows, 0, len(out), threads, *arrays_of(given))


def _may_read(numbers: Tensor) -> bool:
    """Return whether each row lies in one piece, in a dtype whose products are rounded to fp32."""
    return numbers.dtype in FORMATS and numbers.stride(1) == 1
