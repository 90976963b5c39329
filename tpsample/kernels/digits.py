"""A digit of a radix search over stored logits: the weights by digit, and the digit they lead to.

Twins: `ShardLogits.digits` and `.next_digit` of `tpsample.logits.shard_logits`.
"""

import triton
import triton.language as tl

from tpsample.kernels.order import below_top, is_done, load_block, masses, order_words


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
    row = tl.program_id(1)
    if is_done(row_done_ptr, row):
        return
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    orders = order_words(logits, ids, mask)
    inside = (orders >> (shift + DIGIT_BITS)) == tl.load(prefix_ptr + row)
    inside = inside & (logits != float("-inf"))
    # Blocks without such a word cost no arithmetic: after two digits they are most blocks.
    if tl.max(inside.to(tl.int32), axis=0) > 0:
        digit = (~(orders >> shift) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)
        if MASS:
            below = below_top(logits, tl.load(top_ptr + row), tl.load(temperature_ptr + row))
            weight = masses(below)
        else:
            weight = tl.full(digit.shape, 1, bins_ptr.dtype.element_ty)
        bins = bins_ptr + row * (1 << DIGIT_BITS) + digit
        tl.atomic_add(bins, weight, mask=inside, sem="relaxed")


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
    """Each row's search with one digit more: the running sum reaches the limit in it. Grid: (F,).

    The new prefix, the weight of the words before it, and the limit, at most the whole weight.
    """
    row, offs = tl.program_id(0), tl.arange(0, 1 << DIGIT_BITS)
    bins = tl.load(bins_ptr + (row << DIGIT_BITS) + offs).to(tl.int64)
    prefix, reached = tl.load(prefix_ptr + row), tl.load(reached_ptr + row)
    limit = tl.minimum(tl.load(limit_ptr + row), reached + tl.sum(bins, axis=0))
    found = tl.sum((reached + tl.cumsum(bins, axis=0) < limit).to(tl.int32), axis=0)
    before = tl.sum(tl.where(offs < found, bins, 0), axis=0)
    tl.store(next_prefix_ptr + row, (prefix << DIGIT_BITS) | ((1 << DIGIT_BITS) - 1 - found))
    tl.store(next_reached_ptr + row, reached + before)
    tl.store(next_limit_ptr + row, limit)
