"""A digit of a radix search over stored logits: the weights by digit, and the digit they lead to.

Twins: `Candidates.digits` and `.next_digit` of `tpsample.logits.candidates`.
"""

import triton
import triton.language as tl

from tpsample.kernels.order import StoredLogits, below_top, is_done, load_block, masses, order_words


@triton.jit
def add_digits(
    bins,
    logits,
    orders,
    prefix,
    shift,
    top,
    temperature,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
):
    """Add a block's weights to the bins of the digits of its words that begin with the prefix."""
    inside = (orders >> (shift + DIGIT_BITS)) == prefix
    inside = inside & (logits != float("-inf"))
    # What is outside costs no arithmetic: after two digits that is most blocks.
    if tl.max(inside.to(tl.int32), axis=0) > 0:
        digit = (~(orders >> shift) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)
        if MASS:
            weight = masses(below_top(logits, top, temperature))
        else:
            weight = tl.full(digit.shape, 1, bins.dtype.element_ty)
        tl.atomic_add(bins + digit, weight, mask=inside, sem="relaxed")


@triton.jit
def next_digit(bins, prefix, reached, limit, DIGIT_BITS: tl.constexpr):
    """The search with one digit more, in which the running sum of int64 [2^DIGIT_BITS] reaches the
    limit: prefix, weight of the words before it, limit."""
    upto = reached + tl.cumsum(bins, axis=0)
    limit = tl.minimum(limit, reached + tl.sum(bins, axis=0))
    found = tl.sum((upto < limit).to(tl.int32), axis=0)
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    before = tl.sum(tl.where(tl.arange(0, DIGITS) < found, bins, 0), axis=0)
    return (prefix << DIGIT_BITS) | (DIGITS - 1 - found), reached + before, limit


@triton.jit(do_not_specialize=["shift"])
def digit_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    prefix_ptr,  # [F] int64
    row_done_ptr,  # [F] bool, or None
    # outputs
    bins_ptr,  # [F, 2^DIGIT_BITS], int64 of masses or int32 of numbers, zero before
    # sizes
    shift,
    vocab_start,
    lead,
    width,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Histogram of the next digit of the words that begin with the prefix. Grid: (blocks, F)."""
    block, row = tl.program_id(0), tl.program_id(1)
    if is_done(row_done_ptr, row):
        return
    stored = StoredLogits(logits_ptr, stride_logits, vocab_start, lead, width)
    logits, ids, mask, _ = load_block(stored, row, block, BLOCK)
    orders, bins = order_words(logits, ids, mask), bins_ptr + row * (1 << DIGIT_BITS)
    prefix, top = tl.load(prefix_ptr + row), tl.load(top_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    add_digits(bins, logits, orders, prefix, shift, top, temperature, MASS, DIGIT_BITS)


@triton.jit
def next_digit_kernel(
    # inputs
    bins_ptr,  # [F, 2^DIGIT_BITS] int64 or int32, over all ranks
    prefix_ptr,  # [F] int64
    reached_ptr,  # [F] int64
    limit_ptr,  # [F] int64
    # outputs
    next_prefix_ptr,  # [F] int64
    next_reached_ptr,  # [F] int64
    next_limit_ptr,  # [F] int64
    # sizes
    DIGIT_BITS: tl.constexpr,
):
    """`next_digit` of each row. Grid: (F,)."""
    row = tl.program_id(0)
    bins = tl.load(bins_ptr + (row << DIGIT_BITS) + tl.arange(0, 1 << DIGIT_BITS)).to(tl.int64)
    prefix, reached = tl.load(prefix_ptr + row), tl.load(reached_ptr + row)
    prefix, reached, limit = next_digit(bins, prefix, reached, tl.load(limit_ptr + row), DIGIT_BITS)
    tl.store(next_prefix_ptr + row, prefix)
    tl.store(next_reached_ptr + row, reached)
    tl.store(next_limit_ptr + row, limit)
