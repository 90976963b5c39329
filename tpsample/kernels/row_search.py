"""The whole threshold search of a row in one program, for a rank that has the whole vocabulary.

A program of a row that the rejection decided ends at once. It serves the few rows that are left
while a CUDA graph is captured, where every launch is made whatever the logits: it takes the place
of 9 or 18 rounds of two launches. Its definition are these rounds, `find_cut` of
`tpsample.logits.cut` and `ShardLogits.best_kept`, of one rank.
"""

import triton
import triton.language as tl

from tpsample.core import word
from tpsample.kernels.digits import add_digits, next_digit
from tpsample.kernels.epilogue import TOKEN_MASK, pack
from tpsample.kernels.order import (
    StoredLogits,
    block_scores,
    is_done,
    load_block,
    load_draw,
    mass_limit,
    order_words,
    value_of,
)
from tpsample.kernels.sums import min_p_cut

WORD_BITS = tl.constexpr(word.EPOCH_SHIFT)


@triton.jit
def weighted_cut(
    stored,
    row,
    bins_ptr,
    limit,
    top,
    temperature,
    MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The word at which the weight of descending words reaches the limit, digit by digit.

    Args:
        bins_ptr: int64 [2^DIGIT_BITS] of this program's own.
    """
    PLACES: tl.constexpr = WORD_BITS // DIGIT_BITS + 1
    bins = bins_ptr + tl.arange(0, 1 << DIGIT_BITS)
    prefix, reached = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for place in range(PLACES):
        tl.store(bins, tl.zeros((1 << DIGIT_BITS,), tl.int64))
        tl.debug_barrier()  # the zeros of all threads are there before any of them adds
        shift = (PLACES - 1 - place) * DIGIT_BITS
        for block in range(tl.cdiv(stored.lead + stored.width, BLOCK)):
            logits, ids, mask, _ = load_block(stored, row, block, BLOCK)
            orders = order_words(logits, ids, mask)
            add_digits(bins_ptr, logits, orders, prefix, shift, top, temperature, MASS, DIGIT_BITS)
        tl.debug_barrier()  # all have added
        # From L2, where the sums are made; an L1 line could be older.
        weights = tl.load(bins, cache_modifier=".cg")
        prefix, reached, limit = next_digit(weights, prefix, reached, limit, DIGIT_BITS)
        tl.debug_barrier()  # all have read before the bins are zero again
    return prefix


@triton.jit(do_not_specialize=["num_samples"])
def row_search_kernel(
    # inputs
    logits_ptr,  # [F, V] fp32
    stride_logits,
    seed_ptr,  # [F] int64
    position_ptr,  # [F] int64
    temperature_ptr,  # [F] fp32
    top_k_ptr,  # [F] int64
    top_p_ptr,  # [F] fp64
    log_min_p_ptr,  # [F] fp64
    keep_ties_ptr,  # [F] bool
    row_done_ptr,  # [F] bool, whether the rejection decided the row
    gathered_ptr,  # [F, 1 + 2 · num_samples · COUNT] int64, the best scores
    sums_ptr,  # [F, 2 · num_samples · COUNT + 1] int64, what stands before them
    # scratch
    bins_ptr,  # [F, 2^DIGIT_BITS] int64
    # outputs
    words_ptr,  # [F, num_samples] int64, score words; those of decided rows stay
    # sizes
    num_samples,
    vocab_start,
    lead,
    width,
    COUNT: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The best score of the kept set of an undecided row. Grid: (F,).

    Such a row is not greedy and has a number for its first logit, or it would be decided.
    """
    row = tl.program_id(0)
    if is_done(row_done_ptr, row):
        return

    # What the rejection found.
    per_row = 1 + 2 * num_samples * COUNT
    top = value_of(tl.load(gathered_ptr + row * per_row))
    total = tl.load(sums_ptr + (row + 1) * per_row - 1)

    # The last kept token.
    stored = StoredLogits(logits_ptr, stride_logits, vocab_start, lead, width)
    temperature, bins = tl.load(temperature_ptr + row), bins_ptr + (row << DIGIT_BITS)
    lowest = tl.where(tl.load(keep_ties_ptr + row), ~TOKEN_MASK, -1).to(tl.int64)
    cut = min_p_cut(top, temperature, tl.load(log_min_p_ptr + row))
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if top_k < width:
        own = weighted_cut(stored, row, bins, top_k, top, temperature, False, DIGIT_BITS, BLOCK)
        cut = tl.maximum(cut, own & lowest)
    if top_p < 1:
        limit = mass_limit(total, top_p)
        own = weighted_cut(stored, row, bins, limit, top, temperature, True, DIGIT_BITS, BLOCK)
        cut = tl.maximum(cut, own & lowest)

    # The best score down to it.
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    for sample in range(num_samples):
        best = tl.full((), 0, tl.int64)
        for block in range(tl.cdiv(lead + width, BLOCK)):
            logits, ids, mask, first_id = load_block(stored, row, block, BLOCK)
            kept = mask & (order_words(logits, ids, mask) >= cut)
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                scores = block_scores(logits, first_id, draw, sample, ROUNDS)
                best = tl.maximum(best, tl.max(tl.where(kept, pack(scores, ids), 0), axis=0))
        tl.store(words_ptr + row * num_samples + sample, best)
