"""Where kept sets end, by a histogram over y and lists of words.

Twins: the methods of `tpsample.backends.torch_.cuts` that serve the same purpose.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.cuts import cut_of_row
from tpsample.backends.triton_.kernels.head import TOKEN_MASK, pack
from tpsample.backends.triton_.kernels.masses import mass_row, masses
from tpsample.backends.triton_.kernels.noise import GREEDY_BELOW, safe_temperature
from tpsample.backends.triton_.kernels.order import (
    blocks_of_program,
    load_block,
    load_nth_block,
    logit_from,
    mark_of,
    mass_limit,
    nan_word,
    order_words,
    row_kernel,
    upto,
    value_of,
)
from tpsample.core import order, word

BINS_PER_Y, LARGEST = Constant(order.BINS_PER_Y), Constant(order.LARGEST)
LAST_BIN, COUNTED_BINS = Constant(order.BINS - 1), Constant(order.COUNTED_BINS)
UPTO_MARGIN, Y_PER_BIN = Constant(1 + order.BIN_MARGIN), Constant(1 / order.BINS_PER_Y)
LOWEST_DRAWABLE, ABOVE_ALL = Constant(word.LOWEST_DRAWABLE), Constant(order.ABOVE_ALL)


@triton.jit
def bins_of(logits, top, temperature):
    """Bins of logits of one row, int32. Twin: `tpsample.core.order.bins_of`."""
    per_logit = tl.div_rn(BINS_PER_Y, safe_temperature(temperature))
    steps = (top - logits) * tl.where(per_logit < LARGEST, per_logit, LARGEST)
    steps = tl.where(logits < top, steps, 0.0)
    return tl.where(steps < LAST_BIN, steps, LAST_BIN).to(tl.int32)


@row_kernel
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


@row_kernel
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
    """Order words down to a cut, or in the bin in which the sum over bins reaches a limit. As many
    are listed as there is room for.

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


@row_kernel
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
    """The word down to which a list has what top_p keeps and the first `number` words of a row.
    Beside it a bound of how many words these are. Grid: (F,)."""
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


@row_kernel
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
