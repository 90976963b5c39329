"""Hidden states, or logits, to words over one range of a shard, in one reading of it.

A block of ids is multiplied by all rows in fp32, or over an 8-bit copy of the weight. Upper ends of
the scores then say which ids of the block reach the best exact scores so far. Only their exact
logits and scores are computed. A block without a proof, because a number is not finite or above
2^100, is computed exactly. So is a block of flat rows, many of whose ids reach the best.
"""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, U64, jit
from tpsample.backends.numba_.kernels.head import (
    changes_block,
    control,
    end_logits,
    exact_logits,
    lower_ends,
    plain_rows,
    slack_of,
)
from tpsample.backends.numba_.kernels.heap import push
from tpsample.backends.numba_.kernels.inputs import (
    BLOCK,
    block_at,
    blocks_of,
    lanes_of,
    part_of,
    put,
    take_rows,
)
from tpsample.backends.numba_.kernels.int8 import first_ends, first_products, quantise
from tpsample.backends.numba_.kernels.noise import (
    exact_score,
    heated,
    noise_of,
    stream_of,
    upper_scores,
)
from tpsample.backends.numba_.kernels.numbers import (
    as_fp32,
    key_of,
    lanes_reaching,
    lowest_lane,
    number_of,
    pack,
    value_of,
)
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.backends.numba_.kernels.products import (
    float64_products,
    products_of,
    round_products,
)
from tpsample.backends.numba_.kernels.store import filter_threshold, is_cheaper_whole
from tpsample.core.word import KEY_NAN, LOWEST_DRAWABLE

ENDS, BOUNDED_ENDS = 1, 2
"""With ENDS a row stores upper bounds of its logits. With BOUNDED_ENDS it also stores how far they
may be above the logits, which is inf for other rows."""


@jit()
def push_block(heap, upper, top, logits, block, stream, weight, hidden, row, head, stored):
    """Push the words of a block that can be among the best; return how many logits were computed.

    Args:
        heap: int64 [count], the best words of the sample, the least first.
        upper: fp32 [BLOCK], upper bounds of the scores; top: the largest bound.
        logits: fp32 [BLOCK], the exact logits, if `hidden` is empty.
        weight, hidden: otherwise exact logits are computed from them; fp32 [D], of the row.
        stored: fp32 [V_local], receives exact logits; empty to store none.
    """
    computed, threshold = 0, value_of(heap[0])
    # The likeliest id first, because its score is the threshold for the others.
    for turn in range(2):
        lanes = lanes_reaching(upper, threshold, lanes_of(block))
        while lanes:
            j = lowest_lane(lanes)
            lanes &= lanes - U64(1)
            # A NaN is not below the threshold.
            if upper[j] < threshold or (turn == 0) != (upper[j] == top):
                continue
            logit = logits[j]
            if len(hidden):
                computed += 1
                local = block.local - block.lane + j
                logit = exact_logits(weight, local, hidden, row, head)[1]
                if len(stored):
                    stored[local] = logit
            score = exact_score(logit, block.base + j, stream)
            push(heap, len(heap), pack(score, block.base + j))
            threshold = value_of(heap[0])
    return computed


@jit(inline=True)
def can_raise(heap, top):
    """Return whether a score of at most `top` can enter a heap. None enters a heap of NaNs."""
    reaches = top > F32(-np.inf) and not top < value_of(heap[0])
    return (reaches or top != top) and key_of(heap[0]) != KEY_NAN


@jit()
def push_first(heap, upper, block, weight, hidden, row, head, stored):
    """Push the order words of a block that can be among the largest; return how many logits were
    computed.

    Args:
        heap: int64 [count], the largest order words so far, the least first.
        upper: fp32 [BLOCK], upper bounds of the logits; the exact logits if `hidden` is empty. The
            other arguments are as in `push_block`.
    """
    computed = 0
    if key_of(heap[0]) == KEY_NAN:  # nothing comes before the first NaNs
        return computed
    lanes = lanes_reaching(upper, value_of(heap[0]), lanes_of(block))
    while lanes:
        j = lowest_lane(lanes)
        lanes &= lanes - U64(1)
        if upper[j] < value_of(heap[0]):
            continue
        logit = upper[j]
        if len(hidden):
            local = block.local - block.lane + j
            logit = exact_logits(weight, local, hidden, row, head)[1]
            stored[local] = logit
            computed += 1
        push(heap, len(heap), pack(logit, block.base + j))
    return computed


@jit()
def number_reaching(heap, upper, slack, block):
    """Return about how many ids of a block can enter a heap.

    Args:
        upper: fp32 [BLOCK], upper bounds of logits.
        slack: how far these may be above the logits, or inf.
    """
    least = value_of(heap[0])
    if least == -np.inf and len(heap) == 1:  # the largest logit of this block is the next threshold
        for j in range(block.lane, block.lane + block.count):
            least = larger(least, upper[j] - slack)
    return number_of(lanes_reaching(upper, least, lanes_of(block))) if least > -np.inf else 0


@jit()
def draws_none(listed, first, step, block, logits):
    """Set upper bounds of logits that no filter can keep to -inf; return whether none is left.

    Args:
        listed: as in `draw`, of a row.
        step: T · y of `draw`, of the row.
        first: the largest order word so far.
    """
    if listed > 1 or not step > -np.inf:
        return listed > 1
    threshold = filter_threshold(F32(-np.inf), 0, value_of(first), step)
    for j in range(BLOCK):
        logits[j] = F32(-np.inf) if logits[j] < threshold else logits[j]
    return lanes_reaching(logits, F32(-np.inf), lanes_of(block)) == 0


@jit(in_parts=True, allocates=True)
def draw(start, stop, part, arguments):
    """Find the best words of a range of the shard.

    If `memory` has rows, upper bounds of the logits are stored there. The logits of the best and
    the first words are stored exactly.

    Args:
        weight: the weight of the shard.
        hidden: [B, D], as `as_fp32` reads it.
        index: int64 [R], the rows of the batch.
        copy: an 8-bit copy that is multiplied first in place of the weight, or None.
        listed: int64 [R], how many first words of a row are found, where `memory` has rows.
        storing: int64 [R], what a row stores in `memory`: 0, ENDS or BOUNDED_ENDS.
        y: float64 [R], `Demand.least`. Tokens below it (`store.filter_threshold`) have no best
            word, nor has a row with several first words.
        best: int64 [parts, rows of the memory, samples, count], updated; the least word first.
        first: int64 [parts, rows of the memory, most], updated: the first order words, the last of
            them first.
        error_bound: fp32 [parts, rows of the memory], updated: how far an upper bound may be above
            its logit.
        computed: int64 [parts, 2, R], added to: how many exact logits of a row were computed, in
            blocks with a proof and in all other blocks.
    """
    weight, hidden, index, copy, draws, head, memory, listed, storing, y = arguments[:10]
    best, first, error_bound, computed = arguments[10:]
    weight = part_of(weight, start, stop)
    rows, noise = take_rows(hidden, index), noise_of(draws, index)
    quantised = quantise(copy, rows, len(index))
    products, sums = products_of(rows, F32), products_of(rows, F64)
    ends, lanes = np.empty((len(index), BLOCK), F32), np.empty((2, BLOCK), F32)
    slacks = np.empty(len(index), F32)
    plain = plain_rows(head, index)
    shared = (
        weight, rows, index, copy, quantised, products, sums, ends, slacks, lanes, noise,
        draws.samples, head, plain,
    )  # fmt: skip
    step = heated(draws.temperature, index, y)
    of_rows = listed, storing, step, first[part], error_bound[part]
    draw_blocks(shared, memory, of_rows, best[part], computed[part])


@jit()
def draw_blocks(shared, memory, of_rows, best, computed):
    """The loop of `draw` over blocks, with all memory allocated by the caller."""
    (
        weight, rows, index, copy, quantised, products, sums, ends, slacks, lanes, noise,
        samples, head, plain,
    ) = shared  # fmt: skip
    listed, storing, step, first, error_bound = of_rows
    upper, lower, stored = lanes[0], lanes[1], lanes[0, :0]
    for n in range(blocks_of(weight)):
        block, pairs = block_at(weight, n), 0
        first_products(copy, quantised, weight, block, rows, products)
        for i in range(len(index)):
            first_ends(copy, quantised, block, products, i, ends[i])
            if changes_block(plain[i], head, index[i], block):
                end_logits(ends[i], block, index[i], head, F32(1))
            slacks[i] = np.inf
            if len(memory.raw):
                if storing[i] == BOUNDED_ENDS:
                    lower_ends(products.values[i], products.errors[i], lower)
                    if changes_block(plain[i], head, index[i], block):
                        end_logits(lower, block, index[i], head, F32(-1))
                    slacks[i] = slack_of(ends[i], lower, block)
                heap = first[memory.stored_rows[i], : listed[i]]
                pairs += number_reaching(heap, ends[i], slacks[i], block)
            elif noise.random[i] == F32(0):  # noise tells other rows' ids apart
                pairs += number_reaching(best[i, 0], ends[i], slacks[i], block)
        whole = is_cheaper_whole(block, len(index), pairs)
        if whole:
            float64_products(weight, block, rows, sums)
        for i in range(len(index)):
            stored_row, proof = memory.stored_rows[i], 0 if products.proved[i] else 1
            logits, hidden = ends[i], rows.hidden[i, : 0 if whole else rows.hidden.shape[1]]
            if whole:
                round_products(weight, block, rows, i, sums, logits)
                if changes_block(plain[i], head, index[i], block):
                    end_logits(logits, block, index[i], head, F32(0))
                computed[1, i] += block.count
            if len(memory.raw):
                stored = (memory.processed if len(memory.processed) else memory.raw)[stored_row]
                if storing[i] or whole:
                    put(logits, block, stored)
                if not (storing[i] and whole):
                    error_bound[stored_row] = larger(error_bound[stored_row], slacks[i])
                # Asked here as well, because a call with a head costs as much as 64 ids.
                least = value_of(first[stored_row, 0])
                if lanes_reaching(logits, least, lanes_of(block)):
                    computed[proof, i] += push_first(
                        first[stored_row, : listed[i]], logits, block, weight, hidden, index[i],
                        head, stored,
                    )  # fmt: skip
            if len(memory.raw) and draws_none(
                listed[i], first[stored_row, 0], step[i], block, logits
            ):
                continue
            for s in range(samples):
                stream = stream_of(noise, i, s)
                top = upper_scores(logits, block, stream, upper)
                if can_raise(best[stored_row, s], top):
                    computed[proof, i] += push_block(
                        best[stored_row, s], upper, top, logits, block, stream, weight, hidden,
                        index[i], head, stored,
                    )  # fmt: skip


@jit(in_parts=True, allocates=True)
def draw_given(start, stop, part, arguments):
    """Find the best words of logits that were computed before.

    Args:
        given: the logits, a `Weight`.
        index: int64 [R], the rows of the batch.
        sources: int64 [R], the rows of `given`. Arguments that are not listed are as in `draw`.
        cut: int64 [R], the least order word that counts; empty if all count.
        by_rows: whether the range is one of the R rows, or else of the ids.
        best: int64 [parts, R, samples, count], updated; the least word first. With `by_rows` all
            parts share the first entry.
    """
    given, index, sources, draws, head, cut, by_rows, bests = arguments
    first_row, last_row, best = 0, len(index), bests[0 if by_rows else part]
    if by_rows:
        first_row, last_row = start, stop
    else:
        given = part_of(given, start, stop)
    noise, none = noise_of(draws, index), np.empty(0, F32)
    logits, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    for i in range(first_row, last_row):
        for n in range(blocks_of(given)):
            block = block_at(given, n)
            first = sources[i] * given.stride + block.local
            numbers = given.numbers[first : first + block.count]
            inside = logits[block.lane : block.lane + block.count]
            for k in range(block.count):
                inside[k] = as_fp32(numbers[k])
            if len(head.slots):  # a call with a head costs as much as 64 ids
                control(logits, block, index[i], head)
            if len(cut) and cut[i] > LOWEST_DRAWABLE:  # no logit but -inf lies below it
                for j in range(block.lane, block.lane + block.count):
                    counts = pack(logits[j], block.base + j) >= cut[i]
                    logits[j] = logits[j] if counts else F32(-np.inf)
            # Most blocks of a listed row have none.
            if not lanes_reaching(logits, F32(-np.inf), lanes_of(block)):
                continue
            for s in range(draws.samples):
                stream = stream_of(noise, i, s)
                top = upper_scores(logits, block, stream, upper)
                if can_raise(best[i, s], top):
                    push_block(
                        best[i, s], upper, top, logits, block, stream, given, none, index[i], head,
                        none,
                    )  # fmt: skip
