"""A filtered row's token as the best score that is in its kept set.

Each rank sends its *best scores*, int64 [1 + 2 · S · COUNT] per row: the first order word, then
per sample the COUNT best score words, then in the same order their order words. Twins:
`ShardLogits.best_scores`, `.before` and `.first_kept` of `tpsample.backends.torch_.passes`.
"""

import triton.language as tl

from tpsample.backends.triton_.kernels.head import KEY_NAN, TOKEN_BITS, TOKEN_MASK, pack
from tpsample.backends.triton_.kernels.largest import words_at
from tpsample.backends.triton_.kernels.masses import LOG2_E_32, TOP_MASS, add_about, error_of
from tpsample.backends.triton_.kernels.noise import safe_temperature
from tpsample.backends.triton_.kernels.order import (
    KEY_MASK,
    blocks_of_program,
    by_thread,
    group_columns,
    is_done,
    is_number,
    load_draw,
    load_nth_block,
    mark_of,
    mass_limit,
    nan_word,
    pop,
    records,
    row_kernel,
    token_scores,
    upto,
    value_of,
)


@row_kernel
def best_scores_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    group_ptr,  # [F, num_samples, num_groups] int64, best score words of groups
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
    COUNT: tl.constexpr,  # a power of two
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # >= num_groups
    BLOCKS: tl.constexpr,  # >= blocks
):
    """The best scores of a row, which lie in the COUNT best groups. Grid: (num_samples, F)."""
    sample, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out = best_scores_ptr + row * (1 + 2 * num_samples * COUNT)
    if sample == 0:
        offs_block = tl.arange(0, BLOCKS)
        first = tl.load(first_ptr + row * blocks + offs_block, mask=offs_block < blocks, other=0)
        tl.store(out, tl.max(first, axis=0))

    offs, group_word = tl.arange(0, COUNT * GROUP), tl.zeros((COUNT * GROUP,), tl.int64)
    groups = words_at(group_ptr + (row * num_samples + sample) * num_groups, 0, num_groups, GROUPS)
    for c in tl.static_range(COUNT):
        best_group = tl.max(groups, axis=0)
        groups = tl.where(groups == best_group, 0, groups)
        group_word = tl.where(offs // GROUP == c, best_group, group_word)
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


@row_kernel
def merge_best_kernel(
    # inputs
    gathered_ptr,  # [num_sources, F, 1 + 2 · num_samples · COUNT] int64
    # outputs
    best_scores_ptr,  # [F, 1 + 2 · num_samples · COUNT] int64
    # sizes
    num_rows,
    num_samples,
    num_sources,
    COUNT: tl.constexpr,  # a power of two
    WORDS: tl.constexpr,  # >= num_sources · COUNT
):
    """The best scores of all ranks as if one rank had them all. Grid: (F,)."""
    row, offs = tl.program_id(0), tl.arange(0, WORDS)
    marks = num_samples * COUNT
    out = best_scores_ptr + row.to(tl.int64) * (1 + 2 * marks)
    of_first = gathered_ptr + (offs * num_rows + row).to(tl.int64) * (1 + 2 * marks)
    first = tl.load(of_first, mask=offs < num_sources, other=0)
    tl.store(out, tl.max(first, axis=0))
    source = offs // COUNT
    own = gathered_ptr + (source * num_rows + row).to(tl.int64) * (1 + 2 * marks) + 1 + offs % COUNT
    for sample in range(num_samples):
        words = own + sample * COUNT
        scores = tl.load(words, mask=source < num_sources, other=0)
        orders = tl.load(words + marks, mask=source < num_sources, other=0)
        for c in tl.static_range(COUNT):
            best, order, scores = pop(scores, orders)
            place = out + 1 + sample * COUNT + c
            tl.store(place, best)
            tl.store(place + marks, order)


@row_kernel
def before_kernel(
    # inputs
    logits_ptr,  # [F, V_local] fp32
    stride_logits,
    temperature_ptr,  # [F] fp32
    least_of_total_ptr,  # [F] int64
    keep_ties_ptr,  # [F] int64
    row_done_ptr,  # [F] bool, or None
    best_scores_ptr,  # [F, 1 + 2 · num_samples · COUNT] int64, of all ranks
    # outputs
    sums_ptr,  # [F, 2 · num_samples · COUNT + 1] int64, zero before: about so much mass, numbers
    # sizes
    num_samples,
    vocab_start,
    lead,
    width,
    blocks_each,
    counts,  # whether numbers are asked for, too
    COUNT: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """About the mass, and the number, of the tokens before each best score. Grid: (F, programs).

    They stay zero for a score that decides nothing, because a better one's token comes earlier, and
    in rows whose largest logit is not finite. `tpsample.core.masses.ABOUT_ERROR` bounds the error.
    """
    row = tl.program_id(0)
    if is_done(row_done_ptr, row):
        return
    marks = num_samples * COUNT
    best = best_scores_ptr + row * (1 + 2 * marks)
    top = value_of(tl.load(best))
    if (tl.abs(top) < float("inf")) == 0:
        return
    scale = LOG2_E_32 / safe_temperature(tl.load(temperature_ptr + row))
    least = mark_of(tl.load(least_of_total_ptr + row))
    # ties="keep": only greater logits come before.
    tie_bits = tl.where(tl.load(keep_ties_ptr + row) > 0, TOKEN_MASK, 0)
    out, total = sums_ptr + row * (2 * marks + 1), tl.zeros((BLOCK // 8,), tl.float32)
    first, last = blocks_of_program(blocks_each, lead, width, BLOCK)
    for sample in range(num_samples):
        words = best + 1 + sample * COUNT
        # Of the best scores that are weighed, the first has the last token in the order.
        lowest = tl.load(words + marks)
        lowest = tl.where(lowest > 0, value_of(lowest), float("inf"))
        for block in range(first, last):
            logits, ids, _, _ = load_nth_block(
                logits_ptr, stride_logits, vocab_start, lead, width, block, BLOCK, float("nan")
            )
            power = tl.exp2((logits - top) * scale)
            if sample == 0:
                total += by_thread(tl.where(upto(logits, ids, least), power, 0.0))
            # Winners are likely tokens: many blocks have none before them.
            largest = tl.max(logits, axis=0)
            if largest >= lowest:
                record = tl.full((), 0, tl.int64)
                for c in range(COUNT):
                    order = tl.load(words + marks + c)
                    if order > record:
                        record = order
                        end = mark_of((order | tie_bits) + 1)  # the words before
                        if largest >= end.at:
                            before, sums = upto(logits, ids, end), out + sample * COUNT + c
                            add_about(sums, by_thread(tl.where(before, power, 0.0)), TOP_MASS)
                            numbers = by_thread(tl.where(before, 1.0, 0.0))
                            if counts != 0:
                                add_about(sums + marks, numbers, 1.0)
    add_about(out + 2 * marks, total, TOP_MASS)


@row_kernel
def first_kept_kernel(
    # inputs
    most_ptr,  # [F] int64
    share_ptr,  # [F] fp64
    least_ptr,  # [F] int64
    best_scores_ptr,  # [F, 1 + 2 · num_samples · COUNT] int64, of all ranks
    sums_ptr,  # [F, 2 · num_samples · COUNT + 1] int64, over all ranks
    # outputs
    words_ptr,  # [F, num_samples] int64, score words; 0 if none of COUNT can be kept
    decided_ptr,  # [F] bool, whether they are right
    top_ptr,  # [F] fp32, the largest logits
    # sizes
    num_samples,
    COUNT: tl.constexpr,  # a power of two
):
    """The first of the best scores that can be in the kept set. Grid: (F,).

    A row is left open where that depends on the error of `before_kernel`. So is a row whose top_p
    meets a total of 0, as `before_kernel` leaves it beside an infinite logit.
    """
    row, offs = tl.program_id(0), tl.arange(0, COUNT)
    marks = num_samples * COUNT
    best = best_scores_ptr + row.to(tl.int64) * (1 + 2 * marks)
    sums, first = sums_ptr + row * (2 * marks + 1), tl.load(best)
    most, least = tl.load(most_ptr + row), tl.load(least_ptr + row)
    total, share = tl.load(sums + 2 * marks), tl.load(share_ptr + row)
    off = error_of(total, total)
    fewest, limit = mass_limit(total - off, share), mass_limit(total + off, share)
    is_nan = ((first >> TOKEN_BITS) & KEY_MASK) == KEY_NAN
    decided = tl.full((), 1, tl.int1)
    for sample in range(num_samples):
        place = sample * COUNT + offs
        orders = tl.load(best + 1 + marks + place)
        mass, words = tl.load(sums + place), tl.load(best + 1 + place)
        error = error_of(mass, total)
        kept = (orders >= least) & (orders >= records(orders)) & (mass - error < limit)
        kept = kept & (tl.load(sums + marks + place) < most)
        best_word = tl.max(tl.where(kept, words, 0), axis=0)
        sure = tl.max(tl.where(kept & (mass + error < fewest), words, 0), axis=0)
        decided = (decided & (best_word > 0) & (best_word == sure)) | ~is_number(first)
        tl.store(words_ptr + row * num_samples + sample, tl.where(is_nan, nan_word(), best_word))
    tl.store(decided_ptr + row, decided)
    tl.store(top_ptr + row, value_of(first))
