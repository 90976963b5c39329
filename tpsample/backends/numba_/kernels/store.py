"""Hidden states to stored logits over one range of a shard: all, or those that filters can keep."""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I64, U64, jit
from tpsample.backends.numba_.kernels.head import (
    changes_block,
    control,
    end_logits,
    exact_logits,
    plain_rows,
    raw_logits,
    up,
    upper_ends,
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
from tpsample.backends.numba_.kernels.noise import heated
from tpsample.backends.numba_.kernels.numbers import (
    as_fp32,
    exact_product,
    lanes_reaching,
    lowest_lane,
    no_overflow,
    number_of,
    pack,
    value_of,
)
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.backends.numba_.kernels.products import (
    float64_products,
    fp32_products,
    products_of,
    round_products,
)
from tpsample.backends.screening.bound import DOWN

PAIR, FEW_ROWS = 8, 2
"""A pair by itself costs as much as PAIR of a whole block, and a block as FEW_ROWS more rows."""
WAITING = 512
"""Most ids of a row that wait at a time. Of V ids in random order, about k (1 + ln(V / k)) wait in
all."""


@jit(inline=True)
def is_cheaper_whole(block, num_rows, pairs):
    """Return whether the exact logits of a whole block cost less than so many of them by pairs."""
    return PAIR * pairs > block.count * (FEW_ROWS + num_rows)


@jit()
def process(block, row, head, memory, i, logits):
    """Process the raw logits of a block, and store them."""
    control(logits, block, row, head)
    put(logits, block, memory.processed[memory.stored_rows[i]])


@jit()
def keep_products(weight, block, rows, products, index, head, plain, memory, logits):
    """Make the exact logits of a block of `float64_products`, and store them."""
    for i in range(len(index)):
        raw, sums, lane = memory.raw[memory.stored_rows[i]], products.values[i], block.lane
        if plain[i] and products.proved[i] and not len(memory.processed):
            part = raw[block.local : block.local + block.count]
            for k in range(block.count):
                part[k] = no_overflow(F32(sums[lane + k]))
            continue
        round_products(weight, block, rows, i, products, logits)
        if not plain[i]:
            raw_logits(logits, block, head, F32(0))
        put(logits, block, raw)
        if len(memory.processed):
            process(block, index[i], head, memory, i, logits)


@jit(in_parts=True, allocates=True)
def store(start, stop, part, arguments):
    """Store all logits of a range; arguments are those of `draw.draw`."""
    weight, hidden, index, head, memory = arguments
    weight = part_of(weight, start, stop)
    rows, logits = take_rows(hidden, index), np.empty(BLOCK, F32)
    products, plain = products_of(rows, F64), plain_rows(head, index)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        float64_products(weight, block, rows, products)
        keep_products(weight, block, rows, products, index, head, plain, memory, logits)


@jit(in_parts=True, allocates=True)
def store_given(start, stop, part, arguments):
    """Store logits that were computed before; arguments are those of `draw.draw_given`."""
    given, index, sources, head, memory = arguments
    given = part_of(given, start, stop)
    logits = np.empty(BLOCK, F32)
    for i in range(len(index)):
        for n in range(blocks_of(given)):
            block = block_at(given, n)
            first = sources[i] * given.stride + block.local
            part, inside = given.numbers[first : first + block.count], logits[block.lane :]
            for k in range(block.count):
                inside[k] = as_fp32(part[k])
            put(logits, block, memory.raw[memory.stored_rows[i]])
            if len(memory.processed):
                process(block, index[i], head, memory, i, logits)


@jit()
def filter_threshold(bound, top_k, top, step):
    """Return the threshold for upper bounds of logits; see `tpsample.backends.screening.bound`.

    Args:
        bound: fp32, a lower bound of the top_k-th logit so far, -inf where there are fewer.
        top_k: 0 without a bound by top_k.
        top: a lower bound of the largest logit so far.
        step: float64, T · y of `Demand.least`, -inf without such a bound.
    """
    threshold = bound if top_k > 0 else F32(-np.inf)
    if top > F32(-np.inf) and step > -np.inf:
        of_least = F64(top) + step - DOWN * (abs(F64(top)) - step) - 1e-30
        threshold = larger(threshold, F32(of_least))
    return threshold


@jit(in_parts=True, allocates=True)
def list_kept(start, stop, part, arguments):
    """Store the logits of a range that the rows' filters can keep, and -inf for the others.

    A block is stored whole if many of its ids are kept, because that is cheaper than pair by pair.
    With top_k an id waits, with bounds of its logit, because later ids may exclude it.

    Args:
        top_k: int64 [R]; temperature: fp32 [B]; y: float64 [R], `Demand.least`.
        first: int64 [parts, stored rows, count], raised: in rows with top_k the first top_k order
            words, the least first.
        computed: as in `tpsample.backends.numba_.kernels.draw.draw`.
    """
    weight, hidden, index, head, memory, top_k, temperature, y, firsts, computed_of = arguments
    weight, first, computed = part_of(weight, start, stop), firsts[part], computed_of[part]
    num_rows, rows, step = len(index), take_rows(hidden, index), heated(temperature, index, y)
    products, sums = products_of(rows, F32), products_of(rows, F64)
    upper, logits = np.empty((num_rows, BLOCK), F32), np.empty(BLOCK, F32)
    tops, reaching = np.empty(num_rows, F32), np.empty(num_rows, U64)
    bounds = np.empty(first.shape, F32)[:num_rows]
    ids, uppers = np.empty((num_rows, WAITING), I64), np.empty((num_rows, WAITING), F32)
    numbers, may_wait = np.empty(num_rows, I64), np.empty(num_rows, np.bool_)
    plain = plain_rows(head, index)
    for i in range(num_rows):
        stored_row = memory.stored_rows[i]
        tops[i], numbers[i], may_wait[i] = -np.inf, 0, top_k[i] > 0
        memory.raw[stored_row, weight.start : weight.stop] = -np.inf
        if len(memory.processed):
            memory.processed[stored_row, weight.start : weight.stop] = -np.inf
        for k in range(top_k[i]):
            bounds[i, k] = value_of(first[stored_row, k])
    waiting = bounds, ids, uppers, numbers, np.empty(num_rows, np.bool_), may_wait
    shared = weight, rows, index, products, sums, head, memory, upper, logits, tops, reaching, plain
    list_blocks(shared, waiting, top_k, step, first, computed)
    for i in range(num_rows):
        threshold = filter_threshold(bounds[i, 0], top_k[i], tops[i], step[i])
        store_waiting(shared, waiting, i, threshold, top_k[i], first, computed)
        if top_k[i] > 0:
            stored = (memory.processed if len(memory.processed) else memory.raw)[
                memory.stored_rows[i], weight.start : weight.stop
            ]
            list_masked(
                stored, weight.first_id + weight.start, first[memory.stored_rows[i]], top_k[i]
            )


@jit()
def list_masked(logits, first_id, first, top_k):
    """Add masked tokens to a list of first order words that has all others, until it is full.

    Args:
        logits: of a row, from id first_id on; the others are as in `list_kept`.
    """
    for j in range(len(logits)):
        if first[0] > 0:
            return
        if logits[j] == F32(-np.inf):
            push(first, top_k, pack(logits[j], first_id + j))


@jit()
def store_waiting(shared, waiting, i, threshold, top_k, first, computed):
    """Store the logits of the waiting ids of a row that reach a threshold; see `list_blocks`.

    If most ids of a full list reach it, ids of this row stop waiting, because hardly any would be
    excluded.
    """
    weight, rows, memory, stored_row = shared[0], shared[1], shared[6], shared[6].stored_rows[i]
    _, ids, uppers, count, _, may_wait = waiting
    stored = 0
    for n in range(count[i]):
        if uppers[i, n] >= threshold:
            v = ids[i, n]
            logit = exact_product(weight.numbers, v * weight.stride, rows.hidden[i])
            memory.raw[stored_row, v] = logit
            if len(memory.processed):
                memory.processed[stored_row, v] = logit
            push(first[stored_row], top_k, pack(logit, weight.first_id + v))
            stored += 1
    computed[0, i] += stored
    may_wait[i] &= 2 * stored <= WAITING
    count[i] = 0


@jit()
def list_blocks(shared, waiting, top_k, step, first, computed):
    """The loop of `list_kept` over blocks, with all memory allocated by the caller.

    Args:
        waiting: fp32 [R, count], lower bounds of the largest logits so far, the least first; then
            [R, WAITING], the columns and the upper bounds of waiting ids; then [R], the number of
            waiting ids, whether ids of this block wait, and whether ids of any block may wait.
    """
    weight, rows, index, products, sums, head, memory, upper, logits, tops, reaching, plain = shared
    bounds, ids, uppers, count, waits, may_wait = waiting
    num_rows = len(index)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        fp32_products(weight, block, rows, products)
        pairs = 0
        for i in range(num_rows):
            upper_ends(products.values[i], products.errors[i], upper[i])
            changed = changes_block(plain[i], head, index[i], block)
            if changed:
                end_logits(upper[i], block, index[i], head, F32(1))
            threshold = filter_threshold(bounds[i, 0], top_k[i], tops[i], step[i])
            lanes = lanes_reaching(upper[i], threshold, lanes_of(block))
            reaching[i] = lanes if tops[i] == tops[i] else U64(0)  # a row with a NaN has no token
            waits[i] = may_wait[i] and products.proved[i] and not changed
            pairs += 0 if waits[i] else number_of(reaching[i])
        whole = is_cheaper_whole(block, num_rows, pairs)
        if whole:
            float64_products(weight, block, rows, sums)
            keep_products(weight, block, rows, sums, index, head, plain, memory, logits)
        for i in range(num_rows):
            stored_row, lanes = memory.stored_rows[i], reaching[i]
            while lanes:
                j = lowest_lane(lanes)
                lanes &= lanes - U64(1)
                threshold = filter_threshold(bounds[i, 0], top_k[i], tops[i], step[i])
                if upper[i, j] < threshold:
                    continue
                v = block.local + j - block.lane
                if waits[i] and not whole:
                    if count[i] == WAITING:
                        store_waiting(shared, waiting, i, threshold, top_k[i], first, computed)
                    ids[i, count[i]], uppers[i, count[i]] = v, upper[i, j]
                    count[i] += 1
                    least = -up(products.errors[i] - products.values[i, j])
                else:
                    computed[0 if products.proved[i] and not whole else 1, i] += 1
                    if not whole:
                        raw, logit = exact_logits(weight, v, rows.hidden[i], index[i], head)
                        memory.raw[stored_row, v] = raw
                        if len(memory.processed):
                            memory.processed[stored_row, v] = logit
                    least = (memory.processed if len(memory.processed) else memory.raw)[
                        stored_row, v
                    ]
                    if top_k[i] > 0:
                        push(first[stored_row], top_k[i], pack(least, weight.first_id + v))
                tops[i] = larger(tops[i], least) if least == least else least  # a NaN stays
                push(bounds[i], top_k[i], least)
