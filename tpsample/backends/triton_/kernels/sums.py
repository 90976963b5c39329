"""Kept sets over stored logits: masses and numbers down to a word, best scores.

Twins: the methods of `tpsample.backends.torch_.passes` that serve the same purpose.
"""

import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.digits import end_of_search
from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS, TOKEN_MASK, pack
from tpsample.backends.triton_.kernels.masses import (
    halves_of_masses,
    mass_row,
    masses,
    masses_alone,
    masses_and_moments,
    masses_of_threads,
)
from tpsample.backends.triton_.kernels.noise import GREEDY_BELOW, safe_temperature
from tpsample.backends.triton_.kernels.order import (
    KEY_MASK,
    add_up,
    better,
    block_scores,
    blocks_of_program,
    by_thread,
    is_done,
    least_logit,
    load_block,
    load_draw,
    load_nth_block,
    mark_of,
    mass_limit,
    nan_word,
    no_best,
    order_words,
    row_kernel,
    token_scores,
    upto,
    value_of,
    word_of_best,
)
from tpsample.core import order
from tpsample.core import spread as twin

ABOVE_ALL = Constant(order.ABOVE_ALL)
FARTHEST, UNITS = Constant(twin.FARTHEST), Constant(twin.UNITS)
INTEGERS_FROM = Constant(twin.INTEGERS_FROM)
HALF_BITS, LOW_HALF = Constant(twin.HALF_BITS), Constant((1 << twin.HALF_BITS) - 1)


@row_kernel
def mass_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    cut_ptr,  # [F] int64, or None for all tokens
    marks_ptr,  # [F, num_marks] int64
    # outputs
    sums_ptr,  # [F, 1 + num_marks] int64, zero before: Σ q of order words >= cut, and numbers; with
    # MOMENTS [F, 2 + num_marks], Σ m as the second
    # sizes
    num_marks,
    vocab_start,
    lead,
    width,
    blocks_each,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass of the tokens down to a word, with MOMENTS the sum of their entropy, and how many order
    words are >= each mark. Grid: (F, programs)."""
    row = tl.program_id(0)
    mass_numbers = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    cut = mark_of(tl.full((), 0, tl.int64))
    if cut_ptr is not None:
        cut = mark_of(tl.load(cut_ptr + row))
    sums = sums_ptr + row * (1 + MOMENTS + num_marks)
    mass, moment = tl.zeros((BLOCK // 8,), tl.int64), tl.zeros((BLOCK // 8,), tl.int64)
    first, last = blocks_of_program(blocks_each, lead, width, BLOCK)
    for block in range(first, last):
        logits, ids, _, _ = load_nth_block(
            logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
        )
        kept = logits == logits
        if cut_ptr is not None:
            kept = upto(logits, ids, cut)
        if MOMENTS:
            own_mass, own_moment = masses_and_moments(logits, mass_numbers, kept)
            mass += own_mass
            moment += own_moment
        else:
            mass += masses_alone(logits, mass_numbers, kept)
        for mark in range(num_marks):
            reached = upto(logits, ids, mark_of(tl.load(marks_ptr + row * num_marks + mark)))
            numbers = by_thread(reached.to(tl.int32))
            add_up(sums + 1 + MOMENTS + mark, numbers.to(tl.int64))
    tl.atomic_add(sums, tl.sum(mass, axis=0), sem="relaxed")
    if MOMENTS:
        tl.atomic_add(sums + 1, tl.sum(moment, axis=0), sem="relaxed")


@row_kernel
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
    temperature = safe_temperature(tl.load(temperature_ptr + row))
    least = least_logit(top, temperature, tl.load(y_ptr + row))
    word = pack(least, tl.full((), TOKEN_MASK, tl.int32))
    tl.store(words_ptr + row, tl.where(top > float("-inf"), word, ABOVE_ALL))


@row_kernel
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
    """The least order word of an unmasked token whose mass is >= a limit. Grid: (F, blocks)."""
    row = tl.program_id(0)
    logits, ids, mask, _ = load_block(logits_ptr, stride_logits, vocab_start, lead, width, BLOCK)
    mass_numbers = mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    reaches = (
        mask & (logits > float("-inf")) & (masses(logits, mass_numbers) >= tl.load(limit_ptr + row))
    )
    least = tl.min(tl.where(reaches, order_words(logits, ids, mask), ABOVE_ALL), axis=0)
    tl.atomic_min(words_ptr + row, least, sem="relaxed")


@row_kernel
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
    """Sums of distances from the largest logit. Grid: (F, blocks). Twin: `tpsample.core.spread`."""
    row = tl.program_id(0)
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


@row_kernel
def best_kept_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    top_ptr,  # [F] fp32
    row_done_ptr,  # [F] bool, or None
    # the search that ends in its last digit, as `last_digit_kernel` has it; any where none does
    searches,
    bins_ptr,
    prefix_ptr,
    reached_ptr,
    limit_ptr,
    keep_ties_ptr,
    least_ptr,
    share_ptr,
    of_greedy_ptr,
    shares,
    keeps_greedy,
    num_rows,
    num_sources,
    place,
    # outputs
    cut_ptr,  # [F] int64, an input where there is no search
    stride_cut,
    best_kept_ptr,  # [F, num_samples, then 2 with WEIGHS, then 1 if it searches] int64, zero before
    # sizes
    num_samples,
    vocab_start,
    lead,
    width,
    blocks_each,
    WEIGHS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of the tokens down to a word; with WEIGHS their mass and number, too.

    Grid: (F, programs). Every program finds for itself where a search ends, so that it takes no
    launch of its own.
    """
    row = tl.program_id(0)
    if is_done(row_done_ptr, row):
        return
    top = tl.load(top_ptr + row)
    out = best_kept_ptr + row * (num_samples + 2 * WEIGHS + searches)
    if searches != 0:
        word = end_of_search(
            logits_ptr, stride_logits, bins_ptr, prefix_ptr, reached_ptr, limit_ptr, keep_ties_ptr,
            least_ptr, share_ptr, of_greedy_ptr, temperature_ptr, top, 1, shares, keeps_greedy,
            num_rows, num_sources, place, vocab_start, lead, width, True, DIGIT_BITS, BLOCK,
        )  # fmt: skip
        tl.store(cut_ptr + row * stride_cut, word)  # the same in all programs of the row
    else:
        word = tl.load(cut_ptr + row * stride_cut)
    cut = mark_of(word)
    mass_numbers = mass_row(top, tl.load(temperature_ptr + row))
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    mass, number = tl.zeros((BLOCK // 8,), tl.int64), tl.zeros((BLOCK // 8,), tl.int32)
    first, last = blocks_of_program(blocks_each, lead, width, BLOCK)
    for sample in range(num_samples):
        best = no_best(BLOCK)
        for block in range(first, last):
            logits, ids, _, first_id = load_nth_block(
                logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
            )
            kept = upto(logits, ids, cut)
            # Most blocks of a filtered row have no kept token.
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                scores = block_scores(logits, first_id, draw, sample)
                best = better(best, scores, ids, kept)
                if WEIGHS:  # noqa: SIM102
                    if sample == 0:
                        high, low = halves_of_masses(logits, mass_numbers)
                        mass += masses_of_threads(high, low, kept)
                        number += by_thread(kept.to(tl.int32))
        word = tl.where(top != top, nan_word(), word_of_best(best))
        tl.atomic_max(out + sample, word, sem="relaxed")
    if WEIGHS:
        tl.atomic_add(out + num_samples, tl.sum(mass, axis=0), sem="relaxed")
        number_of_all = tl.sum(number, axis=0).to(tl.int64)
        tl.atomic_add(out + num_samples + 1, number_of_all, sem="relaxed")


@row_kernel
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
    total_ptr,  # [F] int64, -1 where it is that of the first tokens; None for all rows
    # outputs
    words_ptr,  # [F, num_samples] int64
    cut_ptr,  # [F] int64, or None without the sets
    held_ptr,  # [F, 2] int64
    top_ptr,  # [F] fp32
    drawn_ptr,  # [F, num_samples] int64, the order words of the drawn tokens
    # sizes
    num_samples,
    count,
    BLOCK: tl.constexpr,  # >= count
):
    """The best score among the kept of a row's first tokens, and where these end. Grid: (F,)."""
    row = tl.program_id(0)

    # which of the first tokens are kept
    offs = tl.arange(0, BLOCK)
    orders = tl.load(first_ptr + row * count + offs, mask=offs < count, other=0)
    first = tl.max(orders, axis=0)
    temperature = tl.load(temperature_ptr + row)
    within = (orders > 0) & (offs < tl.load(most_ptr + row))
    in_total = within & (orders >= tl.load(least_of_total_ptr + row))
    logits = value_of(orders)
    mass = tl.where(within, masses(logits, mass_row(value_of(first), temperature)), 0)
    total = tl.sum(tl.where(in_total, mass, 0), axis=0)
    if total_ptr is not None:
        given = tl.load(total_ptr + row)
        total = tl.where(given >= 0, given, total)
    limit = mass_limit(total, tl.load(share_ptr + row))
    kept = within & (orders >= tl.load(least_ptr + row))
    kept = kept & (tl.cumsum(mass, axis=0) - mass < limit)

    # the best score among them
    ids = ((orders & TOKEN_MASK) ^ TOKEN_MASK).to(tl.int32)
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    is_nan = ((first >> TOKEN_BITS) & KEY_MASK) == KEY_NAN
    for sample in range(num_samples):
        scores = token_scores(logits, ids, draw, sample)
        words = tl.where(kept, pack(scores, ids), 0)
        best, place = tl.max(words, axis=0), row * num_samples + sample
        tl.store(words_ptr + place, tl.where(is_nan, nan_word(), best))
        if cut_ptr is not None:
            drawn = tl.max(tl.where((words == best) & (best > 0), orders, 0), axis=0)
            tl.store(drawn_ptr + place, tl.where(is_nan, 0, drawn))

    # where they end
    if cut_ptr is not None:
        kept = kept & ~is_nan
        cut = tl.min(tl.where(kept, orders, ABOVE_ALL), axis=0)
        # Keeping the temperature from above takes 6 registers: an SM then runs 3 programs, not 4.
        cut = tl.where(tl.load(temperature_ptr + row) >= GREEDY_BELOW, cut, first)
        tl.store(cut_ptr + row, tl.where(value_of(first) > float("-inf"), cut, ABOVE_ALL))
        tl.store(held_ptr + 2 * row, tl.sum(tl.where(kept, mass, 0), axis=0))
        tl.store(held_ptr + 2 * row + 1, tl.sum(kept.to(tl.int64), axis=0))
        tl.store(top_ptr + row, value_of(first))


@row_kernel
def top_kernel(
    # inputs
    gathered_ptr,  # [num_sources, F, …] int64, first the first order word of each source
    stride_source,
    stride_row,
    # outputs
    words_ptr,  # [F] int64
    top_ptr,  # [F] fp32
    # sizes
    num_sources,
):
    """The first order word of each row over all ranks, and its logit. Grid: (F,)."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.full((), 0, tl.int64)
    for source in range(num_sources):
        own = gathered_ptr + source * stride_source + row * stride_row
        word = tl.maximum(word, tl.load(own))
    tl.store(words_ptr + row, word)
    tl.store(top_ptr + row, value_of(word))
