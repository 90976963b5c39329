"""A filtered row's token as the best score that is in its kept set.

Each rank sends its *best scores*, int64 [1 + 2 · S · COUNT] per row: the first order word, then
per sample the COUNT best score words, then in the same order their order words. Twins:
`ShardLogits.best_scores`, `.before` and `.first_kept` of `tpsample.backends.torch_.passes`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.head import (
    KEY_NAN,
    TOKEN_BITS,
    TOKEN_MASK,
    max_or_nan,
    pack,
)
from tpsample.backends.triton_.kernels.masses import halves_of_masses, mass_row, sum_of_kept
from tpsample.backends.triton_.kernels.order import (
    KEY_MASK,
    ROW_POINTERS,
    Mark,
    best_of_groups,
    block_scores,
    group_columns,
    is_done,
    is_number,
    load_block,
    load_draw,
    mark_of,
    mass_limit,
    nan_word,
    pop,
    token_scores,
    upto,
    value_of,
)


@triton.jit(
    do_not_specialize=["num_samples", "groups"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def group_best_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    row_done_ptr,  # [F] bool, or None
    # outputs
    best_ptr,  # [F, num_samples, groups] int64, score words; 0 in rows that are done
    first_ptr,  # [F, blocks] int64, order words; 0 in rows that are done
    # sizes
    num_samples,
    groups,
    vocab_start,
    lead,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of each group of ids, the first order word of each block.

    Grid: (F, blocks). It would cost some 50 instructions per logit more to take a block's COUNT
    best here.
    """
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    block_first = first_ptr + row * blocks + block + tl.arange(0, 1)
    rows_best = best_ptr + (row * num_samples).to(tl.int64) * groups
    if is_done(row_done_ptr, row):
        tl.store(block_first, tl.zeros((1,), tl.int64))
        for sample in range(num_samples):
            none = tl.zeros_like(group).to(tl.int64)
            tl.store(rows_best + sample * groups + group, none, mask=group < groups)
        return
    logits, ids, mask, first_id = load_block(
        logits_ptr, stride_logits, vocab_start, lead, width, BLOCK
    )
    tl.store(block_first, best_of_groups(logits, ids, mask, BLOCK))
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    for sample in range(num_samples):
        scores = block_scores(logits, first_id, draw, sample)
        best = best_of_groups(scores, ids, mask, GROUP)
        tl.store(rows_best + sample * groups + group, best, mask=group < groups)


@triton.jit(
    do_not_specialize=["num_samples", "num_groups", "blocks"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def best_scores_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    group_ptr,  # [F, num_samples, num_groups] int64, score words of the best groups
    first_ptr,  # [F, blocks] int64
    # outputs
    best_scores_ptr,  # [F, 1 + 2 · num_samples · COUNT] int64
    # sizes
    num_samples,
    num_groups,
    blocks,
    vocab_start,
    lead,
    width,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,  # >= num_groups · GROUP
    BLOCKS: tl.constexpr,  # >= blocks
):
    """The best scores of the best groups. Grid: (num_samples, F)."""
    sample, row = tl.program_id(0), tl.program_id(1)
    out = best_scores_ptr + row * (1 + 2 * num_samples * COUNT)
    if sample == 0:
        offs_block = tl.arange(0, BLOCKS)
        first = tl.load(first_ptr + row * blocks + offs_block, mask=offs_block < blocks, other=0)
        tl.store(out, tl.max(first, axis=0))

    offs = tl.arange(0, WORDS)
    groups = group_ptr + (row * num_samples + sample) * num_groups
    group_word = tl.load(groups + offs // GROUP, mask=offs < num_groups * GROUP, other=0)
    columns = group_columns(group_word, offs % GROUP, vocab_start, lead, GROUP)
    ids = vocab_start + columns
    mask = (group_word > 0) & (columns >= 0) & (columns < width)
    address = logits_ptr + row.to(tl.int64) * stride_logits + columns
    logits = tl.load(address, mask=mask, other=float("-inf"))
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    scores = token_scores(logits, ids, draw, sample)
    words = tl.where(mask, pack(scores, ids), 0)
    orders = pack(logits, ids)
    for c in tl.static_range(COUNT):
        best, order, words = pop(words, orders)
        place = out + 1 + sample * COUNT + c
        tl.store(place, best)
        tl.store(place + num_samples * COUNT, order)


class Gathered(NamedTuple):
    """The best scores of all ranks: int64 [num_sources, num_rows, 1 + 2 · S · COUNT]."""

    ptr: tl.tensor
    num_rows: tl.tensor
    num_samples: tl.tensor
    num_sources: tl.tensor


@triton.jit
def load_gathered(gathered, row, sample, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Score and order words [WORDS] of all ranks for one sample of a row; 0 beyond them."""
    offs = tl.arange(0, WORDS)
    source = offs // COUNT
    per_row = 1 + 2 * gathered.num_samples * COUNT
    words = gathered.ptr + (source * gathered.num_rows + row).to(tl.int64) * per_row
    words += 1 + sample * COUNT + offs % COUNT
    mask = source < gathered.num_sources
    scores = tl.load(words, mask=mask, other=0)
    return scores, tl.load(words + gathered.num_samples * COUNT, mask=mask, other=0)


@triton.jit
def load_first(gathered, row, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """The largest first order word of the ranks."""
    source = tl.arange(0, WORDS)
    per_row = 1 + 2 * gathered.num_samples * COUNT
    words = gathered.ptr + (source * gathered.num_rows + row).to(tl.int64) * per_row
    return tl.max(tl.load(words, mask=source < gathered.num_sources, other=0), axis=0)


@triton.jit(
    do_not_specialize=["num_rows", "num_samples", "num_sources"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def before_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    least_of_total_ptr,  # [F] int64
    keep_ties_ptr,  # [F] int64
    row_done_ptr,  # [F] bool, or None
    gathered_ptr,  # [num_sources, F, 1 + 2 · num_samples · COUNT] int64
    # outputs
    sums_ptr,  # [F, 2 · num_samples · COUNT + 1] int64, zero before
    # sizes
    num_rows,
    num_samples,
    num_sources,
    vocab_start,
    lead,
    width,
    COUNT: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass and number of the tokens before each of the best scores. Grid: (F, blocks)."""
    row = tl.program_id(0)
    if is_done(row_done_ptr, row):
        return
    logits, ids, _, _ = load_block(
        logits_ptr, stride_logits, vocab_start, lead, width, BLOCK, float("nan")
    )
    gathered = Gathered(gathered_ptr, num_rows, num_samples, num_sources)
    top = value_of(load_first(gathered, row, COUNT, WORDS))
    temperature = tl.load(temperature_ptr + row)
    in_total = upto(logits, ids, mark_of(tl.load(least_of_total_ptr + row)))
    high, low = halves_of_masses(logits, mass_row(top, temperature))
    # ties="keep": only greater logits come before.
    tie_bits = tl.where(tl.load(keep_ties_ptr + row) > 0, TOKEN_MASK, 0)
    marks = num_samples * COUNT
    out = sums_ptr + row * (2 * marks + 1)
    largest = tl.max(logits, axis=0)
    tl.atomic_add(out + 2 * marks, sum_of_kept(high, low, in_total), sem="relaxed")
    for sample in range(num_samples):
        scores, score_orders = load_gathered(gathered, row, sample, COUNT, WORDS)
        # As many scores are greater as come before; 0 stands for none.
        before = tl.sum((scores[None, :] > scores[:, None]).to(tl.int32), axis=1)
        before = tl.where(scores > 0, before, COUNT)
        every = mark_of((score_orders | tie_bits) + 1)  # the words before each
        for c in range(COUNT):
            own = before == c
            at = tl.max(tl.where(own, every.at, float("-inf")), axis=0)
            # Winners are likely tokens: most blocks have none before them.
            if largest >= at:
                after = max_or_nan(tl.where(own, every.after, float("-inf")), 0)
                token = tl.sum(tl.where(own, every.token, 0), axis=0)
                earlier = upto(logits, ids, Mark(at, after, token))
                place = out + sample * COUNT + c
                tl.atomic_add(place, sum_of_kept(high, low, earlier), sem="relaxed")
                number = tl.sum(earlier.to(tl.int32), axis=0)
                tl.atomic_add(place + marks, number.to(tl.int64), sem="relaxed")


@triton.jit(
    do_not_specialize=["num_rows", "num_samples", "num_sources"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def first_kept_kernel(
    # inputs
    most_ptr,  # [F] int64
    share_ptr,  # [F] fp64
    least_ptr,  # [F] int64
    gathered_ptr,  # [num_sources, F, 1 + 2 · num_samples · COUNT] int64
    sums_ptr,  # [F, 2 · num_samples · COUNT + 1] int64, over all ranks
    # outputs
    words_ptr,  # [F, num_samples] int64, score words; 0 if none of COUNT is kept
    decided_ptr,  # [F] bool
    # sizes
    num_rows,
    num_samples,
    num_sources,
    COUNT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The first of the best scores that is in the kept set. Grid: (F,)."""
    row = tl.program_id(0)
    gathered = Gathered(gathered_ptr, num_rows, num_samples, num_sources)
    first = load_first(gathered, row, COUNT, WORDS)
    most, least = tl.load(most_ptr + row), tl.load(least_ptr + row)
    marks = num_samples * COUNT
    sums = sums_ptr + row * (2 * marks + 1)
    limit = mass_limit(tl.load(sums + 2 * marks), tl.load(share_ptr + row))
    is_nan = ((first >> TOKEN_BITS) & KEY_MASK) == KEY_NAN
    decided = tl.full((), 1, tl.int1)
    for sample in range(num_samples):
        scores, orders = load_gathered(gathered, row, sample, COUNT, WORDS)
        found = tl.full((), 0, tl.int64)
        for c in tl.static_range(COUNT):
            score, mark, scores = pop(scores, orders)
            place = sums + sample * COUNT + c
            member = (mark >= least) & (tl.load(place + marks) < most)
            member = member & (tl.load(place) < limit)
            found = tl.maximum(found, tl.where(member, score, 0))
        decided = decided & ((found > 0) | ~is_number(first))
        tl.store(words_ptr + row * num_samples + sample, tl.where(is_nan, nan_word(), found))
    tl.store(decided_ptr + row, decided)
