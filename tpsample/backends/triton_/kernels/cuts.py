"""Where kept sets end by all rules together, and what they hold.

Twins: the methods of `tpsample.backends.torch_.cuts` that serve the same purpose, and
`ShardLogits.last_cut` of `tpsample.backends.torch_.passes`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.head import TOKEN_MASK
from tpsample.backends.triton_.kernels.noise import GREEDY_BELOW, safe_temperature
from tpsample.backends.triton_.kernels.order import row_kernel, value_of
from tpsample.core import masses as twin
from tpsample.core import order, word

LOWEST_DRAWABLE, ABOVE_ALL = Constant(word.LOWEST_DRAWABLE), Constant(order.ABOVE_ALL)
TOP_MASS = Constant(twin.TOP_MASS)


@triton.jit
def cut_of_row(cut, of_greedy_ptr, keeps_greedy, temperature_ptr, top):
    """Where a row's kept set ends: at a cut of its own if it is greedy, above all words if none of
    its logits is a number."""
    row = tl.program_id(0)
    of_greedy = tl.load(of_greedy_ptr + row)
    of_greedy = tl.where(keeps_greedy != 0, LOWEST_DRAWABLE, of_greedy)
    cut = tl.where(tl.load(temperature_ptr + row) >= GREEDY_BELOW, cut, of_greedy)
    return tl.where(top > float("-inf"), cut, ABOVE_ALL)


@row_kernel
def last_cut_kernel(
    # inputs
    least_ptr,  # [F] int64
    of_greedy_ptr,  # [F] int64, but for keeps_greedy
    keeps_greedy,  # whether greedy rows keep what a mask leaves
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    # outputs
    cut_ptr,  # [F] int64
):
    """Where kept sets end whose filters end at some words. Grid: (F,)."""
    row = tl.program_id(0)
    least, top = tl.load(least_ptr + row), tl.load(top_ptr + row)
    tl.store(cut_ptr + row, cut_of_row(least, of_greedy_ptr, keeps_greedy, temperature_ptr, top))


@row_kernel
def set_sizes_kernel(
    # inputs
    gathered_ptr,  # [num_sources, F, 2] int64, mass and number
    stride_source,
    stride_row,
    stride_number,
    temperature_ptr,  # [F] fp32
    cut_ptr,  # [F] int64
    drawn_ptr,  # [F] bool
    # outputs
    size_ptr,  # [F] int64
    whole_ptr,  # [F] bool
    overflow_ptr,  # [F] bool
    offset_ptr,  # [F + 1] int64
    mass_ptr,  # [F] int64
    listed_cut_ptr,  # [F] int64
    needed_ptr,  # [3] int64
    # sizes
    num_rows,
    num_sources,
    cap,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Sizes of kept sets, which of them are listed, and where. One program for all rows."""
    none = tl.full((), 0, tl.int64)
    total, longest, widest = none, none, none
    for start in range(0, num_rows, BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = row < num_rows
        size, mass, most = tl.zeros_like(row), tl.zeros_like(row), tl.zeros_like(row)
        for source in range(num_sources):
            own = gathered_ptr + source * stride_source + row * stride_row
            count = tl.load(own + stride_number, mask=inside, other=0)
            size, most = size + count, tl.maximum(most, count)
            mass += tl.load(own, mask=inside, other=0)
        cut = tl.load(cut_ptr + row, mask=inside, other=0)
        random = tl.load(temperature_ptr + row, mask=inside, other=1.0) >= GREEDY_BELOW
        size = tl.where(random, size, (cut < ABOVE_ALL).to(tl.int64))
        drawn = tl.load(drawn_ptr + row, mask=inside, other=0)
        size = tl.where(drawn != 0, size, 0)
        whole = size == vocab_size
        listed = inside & (size <= cap) & ~whole
        kept = tl.where(listed, size, 0)
        tl.store(size_ptr + row, size, mask=inside)
        tl.store(whole_ptr + row, whole, mask=inside)
        tl.store(overflow_ptr + row, (size > cap) & ~whole, mask=inside)
        tl.store(offset_ptr + 1 + row, total + tl.cumsum(kept, axis=0), mask=inside)
        tl.store(mass_ptr + row, tl.where(random, mass, TOP_MASS), mask=inside)
        tl.store(listed_cut_ptr + row, tl.where(kept > 0, cut, ABOVE_ALL), mask=inside)
        total += tl.sum(kept, axis=0)
        longest = tl.maximum(longest, tl.max(kept, axis=0))
        widest = tl.maximum(widest, tl.max(tl.where(kept > 0, most, 0), axis=0))
    tl.store(offset_ptr, none)
    tl.store(needed_ptr, widest)
    tl.store(needed_ptr + 1, longest)
    tl.store(needed_ptr + 2, total)


@row_kernel
def listed_sets_kernel(
    # inputs
    words_ptr,  # [F, count] int64, descending, then 0 or words beyond the set
    stride_words,
    cut_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    log_total_ptr,  # [F] fp64
    offset_ptr,  # [F + 1] int64
    # outputs
    token_ptr,  # [total] int64
    log_mass_ptr,  # [total] fp64
    # sizes
    count,
    BLOCK: tl.constexpr,
):
    """Kept sets of rows one behind the other: ids and log masses. Grid: (blocks, F)."""
    row, offs = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = words_ptr + row.to(tl.int64) * stride_words + offs
    words = tl.load(words, mask=offs < count, other=0)
    logits, top = value_of(words), tl.load(top_ptr + row)
    temperature = safe_temperature(tl.load(temperature_ptr + row)).to(tl.float64)
    below = (logits.to(tl.float64) - top.to(tl.float64)) / temperature
    below = tl.where(logits == top, 0.0, below) - tl.load(log_total_ptr + row)
    place = tl.load(offset_ptr + row) + offs
    kept = (words > 0) & (words >= tl.load(cut_ptr + row))
    tl.store(token_ptr + place, ~words & TOKEN_MASK, mask=kept)
    tl.store(log_mass_ptr + place, below, mask=kept)
