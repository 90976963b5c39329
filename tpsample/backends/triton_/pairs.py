"""Products of single pairs of rows, and sums of weighted rows, as a Triton launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.torch_ import pairs as plain
from tpsample.backends.triton_.kernels.pairs import pair_products_kernel, weighted_rows_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.core.weight_format import FORMATS

BLOCK = 256
"""Numbers of a row that a program takes at a time."""
PAIRS = 8
"""Pairs that a program takes at a time: 2,048 sums in float64 are 32 registers of 128 threads."""


def pair_products(left: Tensor, rows: Tensor, right: Tensor, columns: Tensor) -> Tensor:
    """Return the products of pairs of rows. Twin: `tpsample.backends.torch_.pairs`."""
    if right.dtype not in FORMATS:
        return plain.pair_products(left, rows, right, columns)
    products, (left, right) = left.new_empty(len(rows), dtype=torch.float32), _rows(left, right)
    if len(rows):
        launch_kernel(
            pair_products_kernel,
            (-(-len(rows) // PAIRS),),
            left_ptr=left,
            stride_left=left.stride(0),
            row_ptr=rows.contiguous(),
            right_ptr=right,
            stride_right=right.stride(0),
            column_ptr=columns.contiguous(),
            products_ptr=products,
            num_pairs=len(rows),
            size=left.shape[1],
            PAIRS=PAIRS,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return products


def add_weighted_rows(
    out: Tensor, ends: Tensor, factors: Tensor, source: Tensor, index: Tensor
) -> None:
    """Add weighted rows to rows. Twin: `tpsample.backends.torch_.pairs`."""
    if source.dtype not in FORMATS:
        return plain.add_weighted_rows(out, ends, factors, source, index)
    num_rows, size = out.shape
    if num_rows and len(factors):
        (source,) = _rows(source)
        launch_kernel(
            weighted_rows_kernel,
            (num_rows, -(-size // BLOCK)),
            end_ptr=ends.contiguous(),
            factor_ptr=factors.contiguous(),
            source_ptr=source,
            stride_source=source.stride(0),
            index_ptr=index.contiguous(),
            out_ptr=out,
            size=size,
            PAIRS=PAIRS,
            BLOCK=BLOCK,
            num_warps=4,
        )


def _rows(*matrices: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose rows lie in one piece."""
    return tuple(rows if rows.stride(1) == 1 else rows.contiguous() for rows in matrices)
