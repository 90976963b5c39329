"""What a group's upper end must reach for a filtered row to keep one of its ids.

Twin and proof: `tpsample.screening.filter_bars`. The k-th largest lower end is found in the upper
16 bits of an order-preserving key, one bit after the other, and rounded down to them: a lower bar
only lists more.
"""

import triton
import triton.language as tl

from tpsample.kernels.row_noise import GREEDY_BELOW
from tpsample.request import filters
from tpsample.screening import filter_bars

MAX_TOP_K = tl.constexpr(filters.MAX_TOP_WORDS)
DOWN = tl.constexpr(filter_bars.DOWN)
NO_NUMBER = tl.constexpr(0x007F)
"""The upper half of the key of -inf; below it are NaNs."""


@triton.jit
def kth_largest(values, k):
    """Return the k-th largest of fp32 values rounded down to 16 bits; -inf if they are fewer.

    k = 2 of (3.0, 1.004, 1.0) is 1.0, the upper half of 1.004.
    """
    bits = values.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    half = (ordered >> 16).to(tl.int32)
    found = k * 0
    for place in range(16):
        trial = found | (0x8000 >> place)
        enough = tl.sum((half >= trial).to(tl.int32), axis=0) >= k
        found = tl.where(enough, trial, found)
    ordered = found.to(tl.uint32) << 16
    bits = tl.where(found >= 0x8000, ordered ^ 0x80000000, ordered ^ 0xFFFFFFFF)
    return tl.where(found > NO_NUMBER, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit(do_not_specialize=["groups", "num_rows", "num_samples", "vocab_size"])
def filter_bars_kernel(
    # inputs
    lower_ptr,  # [groups, …] fp32, the groups' largest lower ends, by sample and row
    stride_lower,
    row_ptr,  # [F] int64, the filtered rows
    temperature_ptr,  # [num_rows] fp32
    # their filters, see `RowFilters`, [F] each
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    total_log_min_p_ptr,
    joint_ptr,
    # sizes
    groups,
    num_rows,
    num_samples,
    vocab_size,
    # output
    bar_ptr,  # [num_samples · num_rows] fp32: the largest lower end, raised to the row's bar
    BLOCK: tl.constexpr,  # at least groups
):
    """Set the bars of one filtered row; the noise plays no part, so that its samples have one."""
    place = tl.program_id(0)
    row = tl.load(row_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    whole = tl.load(top_p_ptr + place) >= 1.0
    joint = tl.load(joint_ptr + place) != 0
    by_top_k = (top_k <= MAX_TOP_K) & (top_k < vocab_size) & (whole | ~joint)
    by_min_p = whole | (tl.load(total_log_min_p_ptr + place) > float("-inf"))

    group = tl.arange(0, BLOCK)
    address = lower_ptr + group.to(tl.int64) * stride_lower + row
    lower = tl.load(address, mask=group < groups, other=float("-inf"))
    k = tl.where(by_top_k, top_k, 1).to(tl.int32)
    bar = tl.where(by_top_k, kth_largest(lower, k), float("-inf"))

    highest = tl.load(bar_ptr + row).to(tl.float64)
    temperature = tl.load(temperature_ptr + row)
    safe = tl.where(temperature >= GREEDY_BELOW, temperature, 1.0).to(tl.float64)
    step = safe * tl.load(log_min_p_ptr + place)
    of_min_p = highest + step - DOWN * (tl.abs(highest) - step) - 1e-30
    # An infinite one, up or down, bounds nothing; the difference of two would be a NaN.
    known = by_min_p & (step > float("-inf")) & (tl.abs(highest) < float("inf"))
    of_min_p = tl.where(known, of_min_p, float("-inf")).to(tl.float32)
    bar = tl.maximum(bar, of_min_p)
    for sample in range(1 if num_samples is None else num_samples):
        tl.store(bar_ptr + sample * num_rows + row, bar)
