"""Where kept sets end, and what they hold: bins and lists of words, digits.

Twins: the methods of `tpsample.backends.torch_.cuts` that serve the same purpose.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.head import TOKEN_BITS, TOKEN_MASK, pack
from tpsample.backends.triton_.kernels.masses import (
    halves_of_masses,
    mass_row,
    masses,
    sum_of_kept,
)
from tpsample.backends.triton_.kernels.noise import GREEDY_BELOW, safe_temperature
from tpsample.backends.triton_.kernels.order import (
    ROW_POINTERS,
    blocks_of_program,
    is_done,
    load_block,
    load_nth_block,
    logit_from,
    mark_of,
    mass_limit,
    nan_word,
    order_words,
    upto,
    value_of,
)
from tpsample.core import masses as twin
from tpsample.core import order, word

BINS_PER_Y, LARGEST = Constant(order.BINS_PER_Y), Constant(order.LARGEST)
WORD_BITS = Constant(word.EPOCH_SHIFT)
LAST_BIN, COUNTED_BINS = Constant(order.BINS - 1), Constant(order.COUNTED_BINS)
UPTO_MARGIN, Y_PER_BIN = Constant(1 + order.BIN_MARGIN), Constant(1 / order.BINS_PER_Y)
LOWEST_DRAWABLE, ABOVE_ALL = Constant(word.LOWEST_DRAWABLE), Constant(order.ABOVE_ALL)
TOP_MASS = Constant(twin.TOP_MASS)
SUMMED_DIGITS = Constant(8)
"""Digits whose words a program counts or weighs together."""


@triton.jit
def bins_of(logits, top, temperature):
    """Bins of logits of one row, int32. Twin: `tpsample.core.order.bins_of`."""
    per_logit = tl.div_rn(BINS_PER_Y, safe_temperature(temperature))
    steps = (top - logits) * tl.where(per_logit < LARGEST, per_logit, LARGEST)
    steps = tl.where(logits < top, steps, 0.0)
    return tl.where(steps < LAST_BIN, steps, LAST_BIN).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def bin_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    cut_ptr,  # [F] int64, or None for numbers
    # outputs
    bins_ptr,  # [F, BINS] int32 of numbers, or [F, BINS + 1] int64 of masses, and last that of the
    # tokens down to the cut; zero before
    # sizes
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,
):
    """Histogram of the bins of each row. Grid: (F, blocks)."""
    row = tl.program_id(0)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    top, temperature = tl.load(top_ptr + row), tl.load(temperature_ptr + row)
    place, unmasked = bins_of(logits, top, temperature), mask & (logits != float("-inf"))
    if cut_ptr is None:
        bins = bins_ptr + row * (LAST_BIN + 1) + place
        tl.atomic_add(bins, tl.full(logits.shape, 1, tl.int32), mask=unmasked, sem="relaxed")
    else:
        weight, bins = masses(logits, mass_row(top, temperature)), bins_ptr + row * (LAST_BIN + 2)
        tl.atomic_add(bins + place, weight, mask=unmasked, sem="relaxed")
        kept = unmasked & upto(logits, ids, mark_of(tl.load(cut_ptr + row)))
        total = tl.sum(tl.where(kept, weight, 0), axis=0)
        tl.atomic_add(bins + LAST_BIN + 1, total, sem="relaxed")


@triton.jit
def bin_of(bins_ptr, stride_bins, limit_ptr, stride_limit, share_ptr, BINS: tl.constexpr):
    """The bin in which a row's sum over bins reaches its limit, and the weight before that bin.

    The limit comes third, at most the row's whole weight. Above it, and at the whole number of
    tokens, the bin is BINS. Behind the whole mass there may be tokens without any.
    """
    row, offs = tl.program_id(0), tl.arange(0, BINS)
    bins = tl.load(bins_ptr + row * stride_bins + offs).to(tl.int64)
    limit = tl.load(limit_ptr + row * stride_limit)
    if share_ptr is not None:
        limit = mass_limit(limit, tl.load(share_ptr + row))
    total = tl.sum(bins, axis=0)
    index = tl.sum((tl.cumsum(bins, axis=0) < tl.minimum(limit, total)).to(tl.int32), axis=0)
    reached = tl.sum(tl.where(offs < index, bins, 0), axis=0)
    stops = limit < total
    if share_ptr is not None:
        stops = limit <= total
    return tl.where(stops, index, BINS), reached, tl.minimum(limit, total)


@triton.jit(
    do_not_specialize=["stride_bins", "stride_limit", "count", "blocks_each"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def words_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    cut_ptr,  # [F] int64, or None for the words of a bin
    bins_ptr,  # [F, BINS] int64 or int32, over all ranks
    stride_bins,
    limit_ptr,  # [F] int64, or where there are shares, whole masses
    stride_limit,
    share_ptr,  # [F] fp64, or None
    # outputs
    words_ptr,  # [F, 1 + count] int64, zero before: how many, then words in any order
    reached_ptr,  # [F] int64, the weight of the bins before that of the words
    next_limit_ptr,  # [F] int64, at most the whole weight
    # sizes
    count,
    vocab_start,
    lead,
    width,
    blocks_each,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Order words down to a cut, or in the bin in which the sum over bins reaches a limit, as many
    as there is room for.

    Grid: (F, programs).
    """
    row = tl.program_id(0)
    words = words_ptr + row.to(tl.int64) * (count + 1)
    if cut_ptr is None:
        wanted, reached, limit = bin_of(
            bins_ptr, stride_bins, limit_ptr, stride_limit, share_ptr, BINS
        )
        tl.store(reached_ptr + row, reached)  # the same in all programs of the row
        tl.store(next_limit_ptr + row, limit)
        top, temperature = tl.load(top_ptr + row), tl.load(temperature_ptr + row)
    first, last = blocks_of_program(blocks_each, lead, width, BLOCK)
    for block in range(first, last):
        logits, ids, mask, _ = load_nth_block(
            logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK
        )
        if cut_ptr is not None:
            inside = mask & (order_words(logits, ids, mask) >= tl.load(cut_ptr + row))
        else:
            bins = bins_of(logits, top, temperature)
            inside = mask & (logits != float("-inf")) & (bins == wanted)
        number = tl.sum(inside.to(tl.int32), axis=0)
        if number > 0:
            place = tl.cumsum(inside.to(tl.int32), axis=0)
            place += tl.atomic_add(words, number.to(tl.int64), sem="relaxed")
            orders = order_words(logits, ids, mask)
            tl.store(words + place, orders, mask=inside & (place <= count))


@triton.jit(
    do_not_specialize=["stride_bins", "stride_total", "number"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def list_end_kernel(
    # inputs
    bins_ptr,  # [F, BINS] int64, over all ranks
    stride_bins,
    total_ptr,  # [F] int64, whole masses
    stride_total,
    share_ptr,  # [F] fp64
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    per_mass_ptr,  # [2, BINS] fp32, at least and at most so many tokens per unit of a bin's mass
    # outputs
    cut_ptr,  # [F] int64
    room_ptr,  # [F] int64, above all words where masses bound nothing
    # sizes
    number,
    BINS: tl.constexpr,
):
    """The word down to which a list has what top_p keeps and the first `number` words of a row, and
    a bound of how many these are. Grid: (F,)."""
    row, offs = tl.program_id(0), tl.arange(0, BINS)
    end, _, _ = bin_of(bins_ptr, stride_bins, total_ptr, stride_total, share_ptr, BINS)
    mass = tl.load(bins_ptr + row * stride_bins + offs).to(tl.float32)
    fewest = tl.ceil(tl.load(per_mass_ptr + offs) * mass).to(tl.int64)
    few = tl.cumsum(fewest, axis=0) < number
    end = tl.maximum(end, tl.sum(few.to(tl.int32), axis=0))
    # The words lie in the bins up to this one and, as bins are rounded, in the next.
    most = tl.floor(tl.load(per_mass_ptr + BINS + offs) * mass).to(tl.int64)
    room = tl.sum(tl.where(offs <= end + 1, most, 0), axis=0)
    top, temperature = tl.load(top_ptr + row), tl.load(temperature_ptr + row)
    bounded = (end + 1 < COUNTED_BINS) & (temperature >= GREEDY_BELOW)
    is_number = top > float("-inf")
    room = tl.where(is_number, tl.where(bounded, room, ABOVE_ALL), 1)
    y = (end.to(tl.float64) + UPTO_MARGIN) * -Y_PER_BIN
    cut = pack(logit_from(top, safe_temperature(temperature), y), tl.full((), TOKEN_MASK, tl.int32))
    any_word = tl.where(top != top, nan_word(), tl.full((), 1, tl.int64))
    tl.store(cut_ptr + row, tl.where(is_number, cut, any_word))
    tl.store(room_ptr + row, room)


@triton.jit
def cut_of_row(cut, of_greedy_ptr, keeps_greedy, temperature_ptr, top):
    """Where a row's kept set ends: at a cut of its own if it is greedy, above all words if none of
    its logits is a number."""
    row = tl.program_id(0)
    of_greedy = tl.load(of_greedy_ptr + row)
    of_greedy = tl.where(keeps_greedy != 0, LOWEST_DRAWABLE, of_greedy)
    cut = tl.where(tl.load(temperature_ptr + row) >= GREEDY_BELOW, cut, of_greedy)
    return tl.where(top > float("-inf"), cut, ABOVE_ALL)


@triton.jit(
    do_not_specialize=["is_last", "keeps_greedy", "room", "num_rows", "num_sources"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def cut_kernel(
    # inputs
    listed_ptr,  # [num_sources, F, 1 + room] int64: how many words, then words in any order, or 0
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    keep_ties_ptr,  # [F] int64
    reached_ptr,  # [F] int64
    limit_ptr,  # [F] int64
    least_ptr,  # [F] int64, the largest cut of other rules, with is_last
    is_last,  # whether the set ends at the largest of the cuts
    of_greedy_ptr,  # [F] int64, with is_last, but for keeps_greedy
    keeps_greedy,  # whether greedy rows keep what a mask leaves
    # outputs
    cut_ptr,  # [F] int64
    left_ptr,  # [F] bool
    # sizes
    room,
    num_rows,
    num_sources,
    MASS: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,  # >= num_sources · room
):
    """The largest word down to which weights reach a limit, or the least, and whether a rank has
    more words than it lists. Grid: (F,).

    Halving finds it, so that the words need no order.
    """
    row, offs, source = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, SOURCES)
    own = listed_ptr + (offs // room * num_rows + row) * (room + 1) + 1 + offs % room
    words = tl.load(own, mask=offs < num_sources * room, other=0)
    top, weight = tl.load(top_ptr + row), (words > 0).to(tl.int64)
    if MASS:
        mass_numbers = mass_row(top, tl.load(temperature_ptr + row))
        weight = tl.where(words > 0, masses(value_of(words), mass_numbers), 0)
    reached, limit = tl.load(reached_ptr + row), tl.load(limit_ptr + row)
    cut, above = tl.min(tl.where(words > 0, words, ABOVE_ALL), axis=0), tl.max(words, axis=0) + 1
    # Down to `cut` they reach the limit, if they do at all, and down to `above` they do not.
    while above - cut > 1:
        middle = cut + ((above - cut) >> 1)
        if reached + tl.sum(tl.where(words >= middle, weight, 0), axis=0) < limit:
            above = middle
        else:
            cut = middle
    cut = tl.where(cut < ABOVE_ALL, tl.maximum(cut, LOWEST_DRAWABLE), LOWEST_DRAWABLE)
    ties = tl.load(keep_ties_ptr + row) > 0
    cut = tl.where(ties, cut & ~TOKEN_MASK, cut)
    if is_last != 0:
        cut = tl.maximum(cut, tl.load(least_ptr + row))
        cut = cut_of_row(cut, of_greedy_ptr, keeps_greedy, temperature_ptr, top)
    tl.store(cut_ptr + row, cut)
    counts = listed_ptr + (source * num_rows + row) * (room + 1)
    most = tl.max(tl.load(counts, mask=source < num_sources, other=0), axis=0)
    tl.store(left_ptr + row, (most > room) & (top > float("-inf")))


@triton.jit
def digits_of(logits, ids, shift, DIGIT_BITS: tl.constexpr):
    """A digit of inverted order words, int32 [BLOCK]: bits from `shift` on. No logit is a NaN.

    An inverted word is (inverted key << TOKEN_BITS) | id, behind bits that are 1. The shifts put
    together 32 bits of it.
    """
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF ^ 0x7FFFFFFF)).to(tl.uint32, bitcast=True)
    beyond = shift - TOKEN_BITS
    of_key = key >> tl.maximum(beyond, 0) << tl.maximum(-beyond, 0)
    of_id = ids.to(tl.uint32, bitcast=True) >> tl.minimum(shift, TOKEN_BITS)
    ones = tl.full((), -1, tl.int32) << tl.minimum(tl.maximum(-(shift - WORD_BITS), 0), 31)
    ones = ones.to(tl.uint32, bitcast=True)
    return ((of_key | of_id | ones) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)


@triton.jit
def with_digit(
    bins_ptr, prefix_ptr, reached_ptr, limit_ptr, share_ptr, shares, DIGIT_BITS: tl.constexpr
):
    """Prefix, weight before it and limit of a row's search with one digit more.

    The running sum over bins reaches the limit in that digit. The limit is at most the whole
    weight.
    """
    row, offs = tl.program_id(0), tl.arange(0, 1 << DIGIT_BITS)
    bins = tl.load(bins_ptr + (row << DIGIT_BITS) + offs).to(tl.int64)
    prefix, reached = tl.load(prefix_ptr + row), tl.load(reached_ptr + row)
    limit, whole = tl.load(limit_ptr + row), reached + tl.sum(bins, axis=0)
    if share_ptr is not None:  # noqa: SIM102
        if shares != 0:
            limit = mass_limit(whole, tl.load(share_ptr + row))
    limit = tl.minimum(limit, whole)
    index = tl.sum((reached + tl.cumsum(bins, axis=0) < limit).to(tl.int32), axis=0)
    before = tl.sum(tl.where(offs < index, bins, 0), axis=0)
    return (prefix << DIGIT_BITS) | ((1 << DIGIT_BITS) - 1 - index), reached + before, limit


@triton.jit(
    do_not_specialize=["shares", "has_digit", "shift", "blocks_each"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
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
        prefix, reached, limit = with_digit(
            before_ptr, prefix_ptr, reached_ptr, limit_ptr, share_ptr, shares, DIGIT_BITS
        )
        lowest = tl.full((), LOWEST_DRAWABLE, tl.int64)
        # The same in all programs of the row.
        tl.store(next_prefix_ptr + row, prefix)
        tl.store(next_reached_ptr + row, reached)
        tl.store(next_limit_ptr + row, limit)
    else:
        prefix = tl.load(prefix_ptr + row)
        lowest = tl.maximum(tl.load(least_ptr + row), LOWEST_DRAWABLE)
    last = mark_of(tl.maximum(prefix << (shift + DIGIT_BITS), lowest))
    before = mark_of((prefix + 1) << (shift + DIGIT_BITS))
    bins, none = bins_ptr + row * (1 << DIGIT_BITS), 1 << DIGIT_BITS
    if MASS:
        mass_numbers = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    first_block, last_block = blocks_of_program(blocks_each, lead, width, BLOCK)
    for block in range(first_block, last_block):
        logits, ids, _, _ = load_nth_block(
            logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
        )
        inside = upto(logits, ids, last) & ~upto(logits, ids, before)
        # Blocks without such a word cost no arithmetic: after two digits they are most blocks.
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            left = tl.where(inside, digits_of(logits, ids, shift, DIGIT_BITS), none)
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


@triton.jit(
    do_not_specialize=["is_last", "shares", "keeps_greedy"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def last_digit_kernel(
    # inputs
    bins_ptr,  # [F, 2^DIGIT_BITS] int64 of masses or int32 of numbers, over all ranks
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
    DIGIT_BITS: tl.constexpr,
):
    """The word at which each search ends, or where a kept set ends. Grid: (F,)."""
    row = tl.program_id(0)
    cut, _, _ = with_digit(bins_ptr, prefix_ptr, reached_ptr, limit_ptr, None, 0, DIGIT_BITS)
    cut = tl.where(tl.load(keep_ties_ptr + row) > 0, cut & ~TOKEN_MASK, cut)
    if is_last != 0:
        least = tl.load(least_ptr + row)
        cut = tl.maximum(cut, least)
        if shares != 0:
            cut = tl.where(tl.load(share_ptr + row) < 1, cut, least)
        top = tl.load(top_ptr + row)
        cut = cut_of_row(cut, of_greedy_ptr, keeps_greedy, temperature_ptr, top)
    tl.store(cut_ptr + row, cut)


@triton.jit(do_not_specialize=["keeps_greedy"], do_not_specialize_on_alignment=ROW_POINTERS)
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


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_sources", "stride_source", "stride_row", "stride_number"),
        *("cap", "vocab_size", "all_drawn"),
    ],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def set_sizes_kernel(
    # inputs
    gathered_ptr,  # [num_sources, F, 2] int64, mass and number
    stride_source,
    stride_row,
    stride_number,
    temperature_ptr,  # [F] fp32
    cut_ptr,  # [F] int64
    drawn_ptr,  # [F] bool, anything if all are
    all_drawn,
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
        size = tl.where((drawn != 0) | (all_drawn != 0), size, 0)
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


@triton.jit(
    do_not_specialize=["count", "stride_words"], do_not_specialize_on_alignment=ROW_POINTERS
)
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
