"""Where kept sets end, by a radix search, digit by digit.

Twins: the methods of `tpsample.backends.torch_.cuts` that serve the same purpose.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.cuts import cut_of_row
from tpsample.backends.triton_.kernels.head import TOKEN_BITS, TOKEN_MASK
from tpsample.backends.triton_.kernels.masses import (
    halves_of_masses,
    mass_row,
    masses,
    sum_of_kept,
)
from tpsample.backends.triton_.kernels.order import (
    blocks_of_program,
    is_done,
    load_nth_block,
    mark_of,
    mass_limit,
    row_kernel,
    upto,
    value_of,
)
from tpsample.core import word

LOWEST_DRAWABLE = Constant(word.LOWEST_DRAWABLE)
SUMMED_DIGITS = Constant(8)
"""Digits whose words a program counts or weighs together."""


@triton.jit
def digits_of(logits, prefix, shift, DIGIT_BITS: tl.constexpr):
    """Digits behind a prefix of inverted keys, uint32 [BLOCK]; DIGITS or more without that prefix.

    Inverted keys ascend while logits descend. `shift` is that of the digit in an order word.
    """
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF ^ 0x7FFFFFFF)).to(tl.uint32, bitcast=True)
    of_key = shift - TOKEN_BITS
    first = (-((prefix + 1) << (of_key + DIGIT_BITS))).to(tl.uint32)
    return (key - first) >> of_key.to(tl.uint32)


@triton.jit
def with_digit(
    bins, prefix_ptr, reached_ptr, limit_ptr, share_ptr, shares, DIGIT_BITS: tl.constexpr
):
    """Prefix, weight before it and limit of a row's search with one digit more, and that digit.

    The running sum over bins, int64, reaches the limit in it. The limit is at most the whole
    weight.
    """
    row, offs = tl.program_id(0), tl.arange(0, 1 << DIGIT_BITS)
    prefix, reached = tl.load(prefix_ptr + row), tl.load(reached_ptr + row)
    limit, whole = tl.load(limit_ptr + row), reached + tl.sum(bins, axis=0)
    if share_ptr is not None:  # noqa: SIM102
        if shares != 0:
            limit = mass_limit(whole, tl.load(share_ptr + row))
    limit = tl.minimum(limit, whole)
    index = tl.sum((reached + tl.cumsum(bins, axis=0) < limit).to(tl.int32), axis=0)
    before = tl.sum(tl.where(offs < index, bins, 0), axis=0)
    prefix = (prefix << DIGIT_BITS) | ((1 << DIGIT_BITS) - 1 - index)
    return prefix, reached + before, limit, index


@row_kernel
def digit_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    row_done_ptr,  # [F] bool, or None
    # the search so far, and the histogram of the digit behind its prefix, see `with_digit`
    before_ptr,  # [F, 2^DIGIT_BITS], over all ranks
    prefix_ptr,
    reached_ptr,
    limit_ptr,
    share_ptr,
    shares,  # whether limits are shares
    has_digit,  # whether there is a digit before; else the prefix is that of the search
    least_ptr,  # [F] int64, words below are in no bin where no digit is before
    # outputs, zero before
    bins_ptr,  # [F, 2^DIGIT_BITS], int64 of masses or int32 of numbers
    next_prefix_ptr,
    next_reached_ptr,
    next_limit_ptr,
    # sizes
    shift,
    vocab_start,
    lead,
    width,
    blocks_each,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A digit more of each search, and the histogram of the digit behind it. Grid: (F, programs).

    Every program finds the digit for itself, which costs less than a launch of its own.
    """
    row = tl.program_id(0)
    if is_done(row_done_ptr, row):
        return
    if has_digit != 0:
        offs = tl.arange(0, 1 << DIGIT_BITS)
        before = tl.load(before_ptr + (row << DIGIT_BITS) + offs).to(tl.int64)
        prefix, reached, limit, _ = with_digit(
            before, prefix_ptr, reached_ptr, limit_ptr, share_ptr, shares, DIGIT_BITS
        )
        lowest = tl.full((), LOWEST_DRAWABLE, tl.int64)
        # The same in all programs of the row.
        tl.store(next_prefix_ptr + row, prefix)
        tl.store(next_reached_ptr + row, reached)
        tl.store(next_limit_ptr + row, limit)
    else:
        prefix = tl.load(prefix_ptr + row)
        lowest = tl.maximum(tl.load(least_ptr + row), LOWEST_DRAWABLE)
    last = mark_of(lowest)
    bins, none = bins_ptr + row * (1 << DIGIT_BITS), 1 << DIGIT_BITS
    if MASS:
        mass_numbers = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    first_block, last_block = blocks_of_program(blocks_each, lead, width, BLOCK)
    for block in range(first_block, last_block):
        logits, ids, _, _ = load_nth_block(
            logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
        )
        found = digits_of(logits, prefix, shift, DIGIT_BITS)
        inside = (found < none) & upto(logits, ids, last)
        # Blocks without such a word cost no arithmetic: after two digits they are most blocks.
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            left = tl.where(inside, found.to(tl.int32, bitcast=True), none)
            if MASS:
                high, low = halves_of_masses(logits, mass_numbers)
            # The first digits of nearly all words are the same few, and a row's programs would wait
            # for each other word by word. So the weights of a few digits are summed before.
            for _ in range(SUMMED_DIGITS):
                least = tl.min(left, axis=0)
                if least < none:
                    own = left == least
                    if MASS:
                        weight = sum_of_kept(high, low, own)
                    else:
                        weight = tl.sum(own.to(tl.int32), axis=0)
                    tl.atomic_add(bins + least, weight, sem="relaxed")
                    left = tl.where(own, none, left)
            if tl.min(left, axis=0) < none:
                if MASS:
                    weights = (high.to(tl.int64) << 20) + low.to(tl.int64)
                else:
                    weights = tl.full(left.shape, 1, tl.int32)
                tl.atomic_add(bins + left, weights, mask=left < none, sem="relaxed")


@triton.jit
def last_equal(
    logits_ptr, stride_logits, vocab_start, lead, width, logit, each, left, BLOCK: tl.constexpr
):
    """The id, int32, of the last kept one of a row's tokens with a logit.

    They are kept by their ids until they weigh `left` or more. Each weighs `each`. If none is kept,
    it is the id before the shard. Twin: `Cuts.nth_equal`, which is told a number of tokens.
    """
    token, block, found = vocab_start.to(tl.int32) - 1, 0, left <= 0
    while (not found) & (block * BLOCK < lead + width):
        logits, ids, _, first_id = load_nth_block(
            logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
        )
        equal = (logits == logit).to(tl.int32)
        weight = tl.sum(equal, axis=0) * each
        found = weight >= left
        if found:
            token, half = first_id, BLOCK // 2
            while half > 0:  # by halves: a running sum takes more registers
                inside = tl.sum(tl.where(ids < token + half, equal, 0), axis=0) * each
                token += tl.where(inside < left, half, 0)
                half //= 2
        left -= weight
        block += 1
    return token


@triton.jit
def end_of_search(
    logits_ptr,
    stride_logits,
    bins_ptr,
    prefix_ptr,
    reached_ptr,
    limit_ptr,
    keep_ties_ptr,
    least_ptr,
    share_ptr,
    of_greedy_ptr,
    temperature_ptr,
    top,
    is_last,
    shares,
    keeps_greedy,
    num_rows,
    num_sources,
    place,
    vocab_start,
    lead,
    width,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The word at which a row's search ends for this rank, or where its kept set does. See
    `last_digit_kernel` for the arguments."""
    row, offs = tl.program_id(0), tl.arange(0, 1 << DIGIT_BITS)
    bins = tl.zeros((1 << DIGIT_BITS,), tl.int64)
    for source in range(num_sources):
        of_rank = bins_ptr + ((source * num_rows + row) << DIGIT_BITS)
        bins += tl.load(of_rank + offs).to(tl.int64)
    key, reached, limit, digit = with_digit(
        bins, prefix_ptr, reached_ptr, limit_ptr, None, 0, DIGIT_BITS
    )
    equal = bins_ptr + (row << DIGIT_BITS) + digit
    for source in range(place):
        reached += tl.load(equal + ((source * num_rows) << DIGIT_BITS)).to(tl.int64)
    weight = tl.load(equal + ((place * num_rows) << DIGIT_BITS)).to(tl.int64)
    left = tl.maximum(limit - reached, 0)
    logit, each = value_of(key << TOKEN_BITS), tl.full((), 1, tl.int64)
    if MASS:
        each = tl.maximum(masses(logit, mass_row(top, tl.load(temperature_ptr + row))), 1)
    token = tl.full((), TOKEN_MASK, tl.int32)
    if (left + each <= weight) & (tl.load(keep_ties_ptr + row) == 0):
        token = last_equal(
            logits_ptr, stride_logits, vocab_start, lead, width, logit, each, left, BLOCK
        )
    cut = (key << TOKEN_BITS) + (TOKEN_MASK - token)
    if is_last != 0:
        least = tl.load(least_ptr + row)
        cut = tl.maximum(cut, least)
        if shares != 0:
            cut = tl.where(tl.load(share_ptr + row) < 1, cut, least)
        cut = cut_of_row(cut, of_greedy_ptr, keeps_greedy, temperature_ptr, top)
    return cut


@row_kernel
def last_digit_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    bins_ptr,  # [W, F, 2^DIGIT_BITS] int64 of masses or int32 of numbers, of each rank
    prefix_ptr,  # [F] int64
    reached_ptr,  # [F] int64
    limit_ptr,  # [F] int64
    keep_ties_ptr,  # [F] int64
    least_ptr,  # [F] int64, the largest cut of other rules, with is_last
    share_ptr,  # [F] fp64, with shares
    of_greedy_ptr,  # [F] int64, with is_last, but for keeps_greedy
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    is_last,  # whether the set ends at the largest of the cuts
    shares,  # whether a share of 1 cuts nothing
    keeps_greedy,  # whether greedy rows keep what a mask leaves
    # outputs
    cut_ptr,  # [F] int64
    # sizes
    num_rows,
    num_sources,
    place,  # of this rank among the sources, which are in the order of their ids
    vocab_start,
    lead,
    width,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The word at which each search ends for this rank, or where a kept set does. Grid: (F,)."""
    row = tl.program_id(0)
    cut = end_of_search(
        logits_ptr, stride_logits, bins_ptr, prefix_ptr, reached_ptr, limit_ptr, keep_ties_ptr,
        least_ptr, share_ptr, of_greedy_ptr, temperature_ptr, tl.load(top_ptr + row), is_last,
        shares, keeps_greedy, num_rows, num_sources, place, vocab_start, lead, width, MASS,
        DIGIT_BITS, BLOCK,
    )  # fmt: skip
    tl.store(cut_ptr + row, cut)
