"""Logprobs: words of given ids, and the arithmetic on rows. Twin: `backends.torch_.logprobs`."""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.decode import NO_TOKEN
from tpsample.backends.triton_.kernels.head import TOKEN_BITS, TOKEN_MASK
from tpsample.backends.triton_.kernels.largest import words_at
from tpsample.backends.triton_.kernels.masses import mass_row, masses_and_moments
from tpsample.backends.triton_.kernels.noise import safe_temperature
from tpsample.backends.triton_.kernels.order import (
    KEY_MASK,
    group_columns,
    is_number,
    order_words,
    row_kernel,
    value_of,
)
from tpsample.core import masses

LN2 = Constant(masses.LN2)


@triton.jit
def words_of_ids(row_logits_ptr, row_ids_ptr, place, num_ids, vocab_start, width):
    """The order words of a row's given ids at some places; 0 for ids of other ranks and for -1."""
    ids = tl.load(row_ids_ptr + place, mask=place < num_ids, other=-1)
    columns = ids - vocab_start
    mine = (columns >= 0) & (columns < width) & (ids >= 0)
    logits = tl.load(row_logits_ptr + columns, mask=mine, other=0.0)
    return order_words(logits, ids.to(tl.int32), mine)


@row_kernel
def own_words_kernel(
    # inputs
    logits_ptr,  # [R, V_local] fp32
    stride_logits,
    first_ptr,  # [R, count] int64
    stride_first,
    ids_ptr,  # [R, num_ids] int64
    # outputs
    words_ptr,  # [R, count + num_ids] int64; 0 for ids of other ranks and for -1
    # sizes
    count,
    num_ids,
    vocab_start,
    lead,
    width,
    BLOCK: tl.constexpr,  # >= count, num_ids
):
    """The first words, and the order words of given ids. Grid: (R,)."""
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    own = words_ptr + row * (count + num_ids) + place
    first = tl.load(first_ptr + row * stride_first + place, mask=place < count)
    tl.store(own, first, mask=place < count)
    logits = logits_ptr + row.to(tl.int64) * stride_logits
    given = words_of_ids(logits, ids_ptr + row * num_ids, place, num_ids, vocab_start, width)
    tl.store(own + count, given, mask=place < num_ids)


@row_kernel
def few_words_kernel(
    # inputs
    logits_ptr,  # [R, V_local] fp32
    stride_logits,
    first_ptr,  # [R, num_groups] int64, the first word of each group, or 0
    ids_ptr,  # [R, num_ids] int64
    # outputs
    words_ptr,  # [R, count + num_ids] int64, as in `own_words_kernel`
    # sizes
    count,
    num_ids,
    num_groups,
    vocab_start,
    lead,
    width,
    MOST: tl.constexpr,  # >= count
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # >= num_groups
):
    """A few first words, which lie in as many groups, and the order words of given ids. Grid: (R,).

    Twin: `ShardLogits.own_words` of `tpsample.backends.torch_.passes`.
    """
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, MOST * GROUP)
    logits, own = logits_ptr + row * stride_logits, words_ptr + row * (count + num_ids)
    group_word = tl.zeros((MOST * GROUP,), tl.int64)
    groups = words_at(first_ptr + row * num_groups, 0, num_groups, GROUPS)
    for place in range(count):
        best = tl.max(groups, axis=0)
        groups = tl.where(groups == best, 0, groups)
        group_word = tl.where(offs // GROUP == place, best, group_word)
    columns = group_columns(group_word, offs % GROUP, vocab_start, lead, GROUP)
    mask = (group_word > 0) & (columns >= 0) & (columns < width)
    values = tl.load(logits + columns, mask=mask, other=0.0)
    words = order_words(values, vocab_start + columns, mask)
    for place in range(count):
        best = tl.max(words, axis=0)
        words = tl.where(words == best, 0, words)
        tl.store(own + place, best)
    for start in range(0, num_ids, MOST):
        places = start + tl.arange(0, MOST)
        given = words_of_ids(logits, ids_ptr + row * num_ids, places, num_ids, vocab_start, width)
        tl.store(own + count + places, given, mask=places < num_ids)


@row_kernel
def listed_words_kernel(
    # inputs
    gathered_ptr,  # [num_sources, R, count + num_own] int64
    first_ptr,  # [R, count] int64, descending
    stride_first,
    temperature_ptr,  # [R] fp32
    processed_ptr,  # [R] bool
    # outputs
    own_ptr,  # [R, num_own] int64
    top_ptr,  # [R] fp32
    shown_temperature_ptr,  # [R] fp32
    marks_ptr,  # [R, num_own + 1] int64
    # sizes
    num_sources,
    count,
    num_own,
    BLOCK: tl.constexpr,  # > num_own
):
    """The words of all ranks that logprobs are told of. Grid: (R,)."""
    row, rows, place = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    own = tl.zeros((BLOCK,), tl.int64)
    for source in range(num_sources):
        words = gathered_ptr + (source * rows + row) * (count + num_own) + count + place
        own = tl.maximum(own, tl.load(words, mask=place < num_own, other=0))
    first = first_ptr + row * stride_first
    marked = tl.where(place < num_own, own, tl.load(first + count - 1)) & ~TOKEN_MASK
    temperature = safe_temperature(tl.load(temperature_ptr + row))
    temperature = tl.where(tl.load(processed_ptr + row), temperature, 1.0)
    tl.store(own_ptr + row * num_own + place, own, mask=place < num_own)
    tl.store(marks_ptr + row * (num_own + 1) + place, marked, mask=place <= num_own)
    tl.store(top_ptr + row, value_of(tl.load(first)))
    tl.store(shown_temperature_ptr + row, temperature)


@row_kernel
def weighed_words_kernel(
    # inputs
    first_ptr,  # [R, num_words] int64, descending
    drawn_ptr,  # [R, num_drawn] int64
    cut_ptr,  # [R] int64
    temperature_ptr,  # [R] fp32
    # outputs
    top_ptr,  # [R] fp32
    shown_temperature_ptr,  # [R] fp32
    sums_ptr,  # [R, 3 + num_drawn] int64: Σ q, Σ m, and how many of the kept reach each drawn word,
    # and the last that is reported
    # sizes
    num_words,
    count,
    num_drawn,
    BLOCK: tl.constexpr,  # >= num_words
):
    """The sums of logprobs over kept sets that lie among first words. Grid: (R,)."""
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    first = first_ptr + row * num_words
    words = tl.load(first + offs, mask=offs < num_words, other=0)
    kept, top = words >= tl.load(cut_ptr + row), value_of(tl.load(first))
    temperature = safe_temperature(tl.load(temperature_ptr + row))
    mass, moment = masses_and_moments(value_of(words), mass_row(top, temperature), kept)
    sums = sums_ptr + row * (3 + num_drawn)
    tl.store(sums, tl.sum(mass, axis=0))
    tl.store(sums + 1, tl.sum(moment, axis=0))
    for i in range(num_drawn + 1):
        mark = tl.load(first + count - 1)
        if i < num_drawn:
            mark = tl.load(drawn_ptr + row * num_drawn + i)
        reached = kept & (words >= (mark & ~TOKEN_MASK))
        tl.store(sums + 2 + i, tl.sum(reached.to(tl.int64), axis=0))
    tl.store(top_ptr + row, top)
    tl.store(shown_temperature_ptr + row, temperature)


@row_kernel
def told_logprobs_kernel(
    # inputs
    first_ptr,  # [R, count] int64, descending
    stride_first,
    own_ptr,  # [R, S + C] int64
    top_ptr,  # [R] fp32
    temperature_ptr,  # [R] fp32, 1 in a raw mode
    sampled_ptr,  # [R, S] int64
    chosen_ptr,  # [R, C] int64
    cut_ptr,  # [R] int64, or None where no set ends
    sums_ptr,  # [R, 2 + S + C + 1] int64: Σ q, Σ m, and how many words reach each mark
    log_total_ptr,  # [R] fp64
    as_logits_ptr,  # [R] bool
    top_of_ptr,  # [R] int64
    # outputs
    token_ptr,  # [R, S + N + C] int64
    value_ptr,  # [R, S + N + C] fp64
    rank_ptr,  # [R, S + N + C] int64
    entropy_ptr,  # [R] fp64
    # sizes
    count,
    num_drawn,  # S
    num_top,  # N
    num_chosen,  # C
    vocab_size,
    BLOCK: tl.constexpr,  # >= S + N + C
):
    """Ids, values and ranks of the sampled, the first and the chosen tokens. Grid: (R,)."""
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    width, num_own = num_drawn + num_top + num_chosen, num_drawn + num_chosen
    inside, is_drawn = place < width, place < num_drawn
    is_top = (place >= num_drawn) & (place < num_drawn + num_top)
    own_place = tl.where(is_drawn, place, place - num_top)
    is_own, rank_in = inside & ~is_top, place - num_drawn
    first = first_ptr + row * stride_first
    words = tl.load(own_ptr + row * num_own + own_place, mask=is_own, other=0)
    words = tl.where(is_top, tl.load(first + rank_in, mask=is_top, other=0), words)
    sampled = tl.load(sampled_ptr + row * num_drawn + place, mask=is_drawn, other=0)
    chosen_place = place - num_drawn - num_top
    is_chosen = inside & (chosen_place >= 0)
    chosen = tl.load(chosen_ptr + row * num_chosen + chosen_place, mask=is_chosen, other=-1)

    # How many of the first words have no lower key, and how many are kept.
    cut, keys = tl.full((), 0, tl.int64), (words >> TOKEN_BITS) & KEY_MASK
    if cut_ptr is not None:
        cut = tl.load(cut_ptr + row)
    ranks, num_kept = tl.zeros((BLOCK,), tl.int64), tl.full((), 0, tl.int64)
    for other in range(count):
        other_word = tl.load(first + other)
        ranks += (((other_word >> TOKEN_BITS) & KEY_MASK) >= keys).to(tl.int64)
        num_kept += (other_word >= cut).to(tl.int64)
    last = (tl.load(first + count - 1) >> TOKEN_BITS) & KEY_MASK
    sums = sums_ptr + row * (num_own + 3)
    counts = sums + 2
    ranks = tl.where(keys == last, tl.load(counts + num_own), tl.minimum(ranks, num_kept))
    ranks = tl.where(is_own, tl.load(counts + own_place, mask=is_own, other=0), ranks)
    kept = words >= cut
    ranks = tl.where(kept, ranks, vocab_size)

    top = tl.load(top_ptr + row)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    logits = value_of(words)
    below = (logits.to(tl.float64) - top.to(tl.float64)) / temperature
    log_total = tl.load(log_total_ptr + row)
    values = tl.where(logits == top, 0.0, below) - log_total
    scaled = logits.to(tl.float64) / temperature
    values = tl.where(tl.load(as_logits_ptr + row), scaled, values)

    has_values = is_number(tl.load(first))
    has_values = has_values & (tl.min(tl.where(is_drawn, sampled, 0), axis=0) >= 0)
    wanted = is_drawn | (is_top & (rank_in < tl.load(top_of_ptr + row))) | (chosen >= 0)
    wanted = wanted & has_values
    tokens = (words & TOKEN_MASK) ^ TOKEN_MASK
    out = row * width + place
    values = tl.where(kept, values, float("-inf"))
    tl.store(token_ptr + out, tl.where(wanted, tokens, NO_TOKEN), mask=inside)
    tl.store(value_ptr + out, tl.where(wanted, values, float("nan")), mask=inside)
    tl.store(rank_ptr + out, tl.where(wanted, ranks, 0), mask=inside)
    mean = tl.load(sums + 1).to(tl.float64) / tl.load(sums).to(tl.float64)
    entropy = log_total + mean * LN2
    tl.store(entropy_ptr + row, tl.where(has_values, entropy, float("nan")))
