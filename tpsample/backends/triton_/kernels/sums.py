"""Kept sets over stored logits: masses and numbers down to a word, digits, best scores.

Twins: the methods of `tpsample.backends.torch_.passes` that serve the same purpose.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS, TOKEN_MASK, pack
from tpsample.backends.triton_.kernels.masses import mass_row, masses, masses_and_moments
from tpsample.backends.triton_.kernels.noise import safe_temperature
from tpsample.backends.triton_.kernels.order import (
    KEY_MASK,
    ROW_POINTERS,
    block_scores,
    is_done,
    least_logit,
    load_block,
    load_draw,
    mass_limit,
    nan_word,
    order_words,
    token_scores,
    value_of,
)
from tpsample.core import order, word
from tpsample.core import spread as twin

ABOVE_ALL = tl.constexpr(order.ABOVE_ALL)
BINS_PER_Y, LARGEST = tl.constexpr(order.BINS_PER_Y), tl.constexpr(order.LARGEST)
LAST_BIN = tl.constexpr(order.BINS - 1)
LOWEST_DRAWABLE = tl.constexpr(word.LOWEST_DRAWABLE)
FARTHEST, UNITS = tl.constexpr(twin.FARTHEST), tl.constexpr(twin.UNITS)
INTEGERS_FROM = tl.constexpr(twin.INTEGERS_FROM)
HALF_BITS, LOW_HALF = tl.constexpr(twin.HALF_BITS), tl.constexpr((1 << twin.HALF_BITS) - 1)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def mass_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    cut_ptr,  # [F] int64
    # outputs
    sums_ptr,  # [F, 2] int64, zero before: Σ q, Σ m of order words >= cut
    # sizes
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """Mass of the tokens down to a word, and the sum of their entropy. Grid: (blocks, F)."""
    row = tl.program_id(1)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    orders = order_words(logits, ids, mask)
    kept = mask & (orders >= tl.load(cut_ptr + row))
    its = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    mass, moment = masses_and_moments(logits, its)
    mass, moment = tl.where(kept, mass, 0), tl.where(kept, moment, 0)
    tl.atomic_add(sums_ptr + row * 2, tl.sum(mass, axis=0), sem="relaxed")
    tl.atomic_add(sums_ptr + row * 2 + 1, tl.sum(moment, axis=0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def least_word_kernel(
    # inputs
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    y_ptr,  # [F] fp64
    # outputs
    words_ptr,  # [F] int64
):
    """The order words of `least_logit`. Grid: (F,). Twin: `tpsample.core.order.least_word`."""
    row = tl.program_id(0)
    top = tl.load(top_ptr + row)
    least = least_logit(top, tl.load(temperature_ptr + row), tl.load(y_ptr + row))
    word = pack(least, tl.full((), TOKEN_MASK, tl.int32))
    tl.store(words_ptr + row, tl.where(top > float("-inf"), word, ABOVE_ALL))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def least_of_mass_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    limit_ptr,  # [F] int64
    # outputs
    words_ptr,  # [F] int64, ABOVE_ALL before
    # sizes
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """The least order word of an unmasked token whose mass is >= a limit. Grid: (blocks, F)."""
    row = tl.program_id(1)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    its = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    reaches = mask & (logits > float("-inf")) & (masses(logits, its) >= tl.load(limit_ptr + row))
    least = tl.min(tl.where(reaches, order_words(logits, ids, mask), ABOVE_ALL), axis=0)
    tl.atomic_min(words_ptr + row, least, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def spread_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    top_ptr,  # [F] fp32
    # outputs
    sums_ptr,  # [F, 4] int64, zero before
    # sizes
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """Sums of distances from the largest logit. Grid: (blocks, F). Twin: `tpsample.core.spread`."""
    row = tl.program_id(1)
    logits, _, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    unmasked = mask & (logits > float("-inf"))
    top = tl.load(top_ptr + row)
    distance = tl.where(unmasked & (logits != top), top - logits, 0.0)
    units = tl.minimum(distance, FARTHEST) * UNITS
    rounded = (units + INTEGERS_FROM) - INTEGERS_FROM
    d = tl.where(units < INTEGERS_FROM, rounded, units).to(tl.int64)
    square = d * d
    out = sums_ptr + row * 4
    tl.atomic_add(out, tl.sum(unmasked.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(out + 1, tl.sum(d, axis=0), sem="relaxed")
    tl.atomic_add(out + 2, tl.sum(square >> HALF_BITS, axis=0), sem="relaxed")
    tl.atomic_add(out + 3, tl.sum(square & LOW_HALF, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["num_marks"], do_not_specialize_on_alignment=ROW_POINTERS)
def count_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    marks_ptr,  # [F, num_marks] int64
    # outputs
    counts_ptr,  # [F, num_marks] int64, zero before
    # sizes
    num_marks,
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """How many order words are >= each mark. Grid: (blocks, F)."""
    row = tl.program_id(1)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    orders = order_words(logits, ids, mask)
    for mark in range(num_marks):
        place = row * num_marks + mark
        reached = mask & (orders >= tl.load(marks_ptr + place))
        number = tl.sum(reached.to(tl.int32), axis=0)
        tl.atomic_add(counts_ptr + place, number.to(tl.int64), sem="relaxed")


@triton.jit(
    do_not_specialize=["num_samples"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def best_kept_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    cut_ptr,  # [F] int64
    row_done_ptr,  # [F] bool, or None
    # outputs
    words_ptr,  # [F, num_samples] int64, zero before
    # sizes
    num_samples,
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """The best score of the tokens down to a word. Grid: (blocks, F)."""
    row = tl.program_id(1)
    if is_done(row_done_ptr, row):
        return
    logits, ids, mask, first_id = load_block(
        logits_ptr, stride_logits, vocab_start, lead, width, BLOCK
    )
    kept = mask & (order_words(logits, ids, mask) >= tl.load(cut_ptr + row))
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
        for sample in range(num_samples):
            scores = block_scores(logits, first_id, draw, sample)
            best = tl.max(tl.where(kept, pack(scores, ids), 0), axis=0)
            tl.atomic_max(words_ptr + row * num_samples + sample, best, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_samples", "count"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def top_words_kernel(
    # inputs
    first_ptr,  # [F, count] int64, order words, descending
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    most_ptr,  # [F] int64
    share_ptr,  # [F] fp64
    least_ptr,  # [F] int64
    least_of_total_ptr,  # [F] int64
    # outputs
    words_ptr,  # [F, num_samples] int64
    # sizes
    num_samples,
    count,
    BLOCK: tl.constexpr,  # >= count
):
    """The best score among the kept of a row's first tokens. Grid: (F,)."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    orders = tl.load(first_ptr + row * count + offs, mask=offs < count, other=0)
    first = tl.max(orders, axis=0)
    logits = value_of(orders)
    temperature = safe_temperature(tl.load(temperature_ptr + row))
    top = value_of(first)
    within = (orders > 0) & (offs < tl.load(most_ptr + row))
    in_total = within & (orders >= tl.load(least_of_total_ptr + row))
    mass = tl.where(within, masses(logits, mass_row(top, temperature)), 0)
    total = tl.sum(tl.where(in_total, mass, 0), axis=0)
    limit = mass_limit(total, tl.load(share_ptr + row))
    kept = within & (orders >= tl.load(least_ptr + row))
    kept = kept & (tl.cumsum(mass, axis=0) - mass < limit)

    ids = ((orders & TOKEN_MASK) ^ TOKEN_MASK).to(tl.int32)
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    is_nan = ((first >> TOKEN_BITS) & KEY_MASK) == KEY_NAN
    for sample in range(num_samples):
        scores = token_scores(logits, ids, draw, sample)
        best = tl.max(tl.where(kept, pack(scores, ids), 0), axis=0)
        tl.store(words_ptr + row * num_samples + sample, tl.where(is_nan, nan_word(), best))


@triton.jit(do_not_specialize=["shift"], do_not_specialize_on_alignment=ROW_POINTERS)
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
            its = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
            weight = masses(logits, its)
        else:
            weight = tl.full(digit.shape, 1, bins_ptr.dtype.element_ty)
        bins = bins_ptr + row * (1 << DIGIT_BITS) + digit
        tl.atomic_add(bins, weight, mask=inside, sem="relaxed")


@triton.jit
def bins_of(logits, top, temperature):
    """Bins of logits of one row, int32. Twin: `tpsample.core.order.bins_of`."""
    per_logit = tl.div_rn(BINS_PER_Y, temperature)
    steps = (top - logits) * tl.where(per_logit < LARGEST, per_logit, LARGEST)
    steps = tl.where(logits == top, 0.0, steps)
    return tl.where(steps < LAST_BIN, steps, LAST_BIN).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def bin_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    # outputs
    bins_ptr,  # [F, BINS], int64 of masses or int32 of numbers, zero before
    # sizes
    vocab_start,
    lead,
    width,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Histogram of the bins of each row. Grid: (blocks, F)."""
    row = tl.program_id(1)
    logits, _, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    top, temperature = tl.load(top_ptr + row), tl.load(temperature_ptr + row)
    if MASS:
        weight = masses(logits, mass_row(top, temperature))
    else:
        weight = tl.full(logits.shape, 1, bins_ptr.dtype.element_ty)
    bins = bins_ptr + row * (LAST_BIN + 1) + bins_of(logits, top, temperature)
    tl.atomic_add(bins, weight, mask=mask & (logits != float("-inf")), sem="relaxed")


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=ROW_POINTERS)
def words_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    bin_ptr,  # [F] int64, or None
    cut_ptr,  # [F] int64, where there are no bins
    # outputs
    words_ptr,  # [F, 1 + count] int64, zero before: how many, then words in any order
    # sizes
    count,
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """Order words in one bin of each row, or down to a cut, as many as there is room for.

    Grid: (blocks, F).
    """
    row = tl.program_id(1)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    orders = order_words(logits, ids, mask)
    if bin_ptr is None:
        inside = mask & (orders >= tl.load(cut_ptr + row))
    else:
        bins = bins_of(logits, tl.load(top_ptr + row), tl.load(temperature_ptr + row))
        inside = mask & (logits != float("-inf")) & (bins == tl.load(bin_ptr + row))
    number = tl.sum(inside.to(tl.int64), axis=0)
    if number > 0:
        words = words_ptr + row.to(tl.int64) * (count + 1)
        place = tl.atomic_add(words, number, sem="relaxed") + tl.cumsum(inside.to(tl.int64), axis=0)
        tl.store(words + place, orders, mask=inside & (place <= count))


@triton.jit(
    do_not_specialize=["stride_bins", "stride_limit"], do_not_specialize_on_alignment=ROW_POINTERS
)
def bin_of_kernel(
    # inputs
    bins_ptr,  # [F, BINS] int64 or int32, over all ranks
    stride_bins,
    limit_ptr,  # [F] int64, or the masses of which a share is taken
    stride_limit,
    share_ptr,  # [F] fp64, or None
    # outputs
    bin_ptr,  # [F] int64, BINS where the limit is the whole weight or more
    reached_ptr,  # [F] int64, the weight of the bins before it
    next_limit_ptr,  # [F] int64, at most the whole weight
    # sizes
    BINS: tl.constexpr,
):
    """The bin of each row in which the sum over bins reaches its limit. Grid: (F,)."""
    row, offs = tl.program_id(0), tl.arange(0, BINS)
    bins = tl.load(bins_ptr + row * stride_bins + offs).to(tl.int64)
    limit = tl.load(limit_ptr + row * stride_limit)
    if share_ptr is not None:
        limit = mass_limit(limit, tl.load(share_ptr + row))
    total = tl.sum(bins, axis=0)
    found = tl.sum((tl.cumsum(bins, axis=0) < tl.minimum(limit, total)).to(tl.int32), axis=0)
    tl.store(bin_ptr + row, tl.where(limit < total, found, BINS).to(tl.int64))
    tl.store(reached_ptr + row, tl.sum(tl.where(offs < found, bins, 0), axis=0))
    tl.store(next_limit_ptr + row, tl.minimum(limit, total))


@triton.jit(
    do_not_specialize=["num_words", "room", "num_rows", "num_sources"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def cut_kernel(
    # inputs
    words_ptr,  # [F, num_words] int64, descending
    listed_ptr,  # [W, F, 1 + room] int64, first how many words there are on each rank
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    keep_ties_ptr,  # [F] int64
    reached_ptr,  # [F] int64
    limit_ptr,  # [F] int64
    # outputs
    cut_ptr,  # [F] int64
    left_ptr,  # [F] bool
    # sizes
    num_words,
    room,
    num_rows,
    num_sources,
    MASS: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first word at which a sum of weights reaches its limit, or the last. Grid: (F,)."""
    row, offs, source = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, SOURCES)
    words = tl.load(words_ptr + row * num_words + offs, mask=offs < num_words, other=0)
    top, weight = tl.load(top_ptr + row), (words > 0).to(tl.int64)
    if MASS:
        its = mass_row(top, tl.load(temperature_ptr + row))
        weight = tl.where(words > 0, masses(value_of(words), its), 0)
    upto = tl.load(reached_ptr + row) + tl.cumsum(weight, axis=0)
    before = (upto < tl.load(limit_ptr + row)) & (offs < num_words)
    place = tl.minimum(tl.sum(before.to(tl.int32), axis=0), num_words - 1)
    cut = tl.max(tl.where(offs == place, words, 0), axis=0)
    cut = tl.maximum(cut, LOWEST_DRAWABLE)
    ties = tl.load(keep_ties_ptr + row) > 0
    tl.store(cut_ptr + row, tl.where(ties, cut & ~TOKEN_MASK, cut))
    counts = listed_ptr + (source * num_rows + row) * (room + 1)
    most = tl.max(tl.load(counts, mask=source < num_sources, other=0), axis=0)
    tl.store(left_ptr + row, (most > room) & (top > float("-inf")))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def value_kernel(
    # inputs
    words_ptr,  # [F] int64
    # outputs
    value_ptr,  # [F] fp32
):
    """The logits of order words. Grid: (F,)."""
    row = tl.program_id(0)
    tl.store(value_ptr + row, value_of(tl.load(words_ptr + row)))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
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


@triton.jit(
    do_not_specialize=["count", "stride_words"], do_not_specialize_on_alignment=ROW_POINTERS
)
def listed_sets_kernel(
    # inputs
    words_ptr,  # [F, count] int64, descending, then 0
    stride_words,
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
    words = tl.load(words_ptr + row * stride_words + offs, mask=offs < count, other=0)
    logits, top = value_of(words), tl.load(top_ptr + row)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    below = (logits.to(tl.float64) - top.to(tl.float64)) / temperature
    below = tl.where(logits == top, 0.0, below) - tl.load(log_total_ptr + row)
    place = tl.load(offset_ptr + row) + offs
    tl.store(token_ptr + place, ~words & TOKEN_MASK, mask=words > 0)
    tl.store(log_mass_ptr + place, below, mask=words > 0)
