"""Products of single pairs of rows, and sums of weighted rows. Twin:
`tpsample.backends.torch_.pairs`.

Sums are in float64, because no step of a sampler waits for them.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS


@triton.jit(do_not_specialize=STEP_NUMBERS)
def pair_products_kernel(
    # inputs
    left_ptr,  # [N, D] of any floating dtype
    stride_left,
    row_ptr,  # [T] int64
    right_ptr,  # [M, D] of the same dtype
    stride_right,
    column_ptr,  # [T] int64
    # outputs
    products_ptr,  # [T] fp32
    # sizes
    num_pairs,
    size,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The products of PAIRS pairs of rows. Grid: (pairs / PAIRS,)."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    left = left_ptr + tl.load(row_ptr + pair, mask=inside, other=0) * stride_left
    right = right_ptr + tl.load(column_ptr + pair, mask=inside, other=0) * stride_right
    total = tl.zeros([PAIRS, BLOCK], tl.float64)
    for first in range(0, size, BLOCK):
        d = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (d < size)[None, :]
        x = tl.load(left[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(right[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += x.to(tl.float64) * w.to(tl.float64)
    product = tl.sum(total, axis=1).to(tl.float32)
    product = tl.where(product == float("inf"), float("nan"), product)
    tl.store(products_ptr + pair, product, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["end_ptr"])  # parts of the ends begin anywhere
def weighted_rows_kernel(
    # inputs
    end_ptr,  # [n + 1] int64
    factor_ptr,  # [T] float64
    source_ptr,  # [M, D] of any floating dtype
    stride_source,
    index_ptr,  # [T] int64
    # outputs
    out_ptr,  # [n, D] float64, added to
    # sizes
    size,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted rows, added to one row, PAIRS of them at a time. Grid: (n, D / BLOCK)."""
    row = tl.program_id(0)
    begin, end = tl.load(end_ptr + row), tl.load(end_ptr + row + 1)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([PAIRS, BLOCK], tl.float64)
    for first in range(begin, end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        inside = pair < end
        source = source_ptr + tl.load(index_ptr + pair, mask=inside, other=0) * stride_source
        mask = inside[:, None] & (d < size)[None, :]
        numbers = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + pair, mask=inside, other=0.0)
        total += factor[:, None] * numbers.to(tl.float64)
    out = out_ptr + row.to(tl.int64) * size + d
    own = tl.load(out, mask=d < size, other=0.0)
    tl.store(out, own + tl.sum(total, axis=0), mask=d < size)
