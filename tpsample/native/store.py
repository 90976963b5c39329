"""Hidden states to stored logits over one range of a shard: all, or those that filters can keep."""

from __future__ import annotations

import numpy as np

from tpsample.native.compiling import F32, F64, I64, jit
from tpsample.native.head import (
    control,
    end_logits,
    exact_logits,
    is_plain,
    raw_logits,
    upper_ends,
)
from tpsample.native.heap import push
from tpsample.native.inputs import BLOCK, block_at, blocks_of, put, take_rows
from tpsample.native.numbers import as_fp32, exact_dot, pack, value_of
from tpsample.native.products import float64_products, fp32_products, products_of, round_products
from tpsample.screening.bound import DOWN


@jit()
def process(block, row, head, memory, i, logits):
    """Process the raw logits of a block, and store them."""
    control(logits, block, row, head)
    if len(memory.processed):
        put(logits, block, memory.processed[memory.places[i]])


@jit()
def keep_products(weight, block, rows, products, index, head, plain, memory, logits):
    """Make the exact logits of a block of `float64_products`, and store them."""
    for i in range(len(index)):
        raw, sums, lane = memory.raw[memory.places[i]], products.values[i], block.lane
        if plain and products.proved[i]:
            part = raw[block.local : block.local + block.count]
            for k in range(block.count):
                part[k] = sums[lane + k]
            continue
        round_products(weight, block, rows, i, products, logits)
        if not plain:
            raw_logits(logits, block, head, F32(0))
        put(logits, block, raw)
        if not plain:
            process(block, index[i], head, memory, i, logits)


@jit(entry=True)
def store(weight, hidden, index, head, memory):
    """Store all logits of a range; arguments are those of `tpsample.native.draw.draw`."""
    rows, logits = take_rows(hidden, index), np.empty(BLOCK, F32)
    products, plain = products_of(rows, F64), is_plain(head)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        float64_products(weight, block, rows, products)
        keep_products(weight, block, rows, products, index, head, plain, memory, logits)


@jit(entry=True)
def store_given(given, index, sources, head, memory):
    """Store logits that are there; arguments are those of `tpsample.native.draw.draw_given`."""
    logits = np.empty(BLOCK, F32)
    for i in range(len(index)):
        for n in range(blocks_of(given)):
            block = block_at(given, n)
            first = sources[i] * given.stride + block.local
            part, inside = given.numbers[first : first + block.count], logits[block.lane :]
            for k in range(block.count):
                inside[k] = as_fp32(part[k])
            put(logits, block, memory.raw[memory.places[i]])
            process(block, index[i], head, memory, i, logits)


@jit()
def filter_threshold(word, top_k, top, step):
    """Return what an upper bound of a logit must reach; see `tpsample.screening.bound`.

    Args:
        word: int64, the top_k-th order word so far, 0 where there are fewer.
        top_k: 0 without a bound by top_k.
        top: the largest logit so far.
        step: float64, T ln(min_p), -inf without a bound by min_p.
    """
    threshold = value_of(word) if top_k > 0 else F32(-np.inf)
    if top > F32(-np.inf) and step > -np.inf:
        of_min_p = F64(top) + step - DOWN * (abs(F64(top)) - step) - 1e-30
        threshold = max(threshold, F32(of_min_p))
    return threshold


@jit(entry=True)
def list_kept(weight, hidden, index, head, memory, top_k, step, first, computed):
    """Store the logits of a range that the rows' filters can keep, and -inf for the others.

    A block is stored whole if many of its ids are kept, because that is cheaper than pair by pair.

    Args:
        top_k: int64 [R]; step: float64 [R], see `filter_threshold`.
        first: int64 [stored rows, count], raised: in rows with top_k the first top_k order words,
            the least first.
        computed: as in `tpsample.native.draw.draw`.
    """
    num_rows, rows = len(index), take_rows(hidden, index)
    products, sums = products_of(rows, F32), products_of(rows, F64)
    upper, logits = np.empty((num_rows, BLOCK), F32), np.empty(BLOCK, F32)
    tops, reaching = np.full(num_rows, -np.inf, F32), np.empty(num_rows, I64)
    for i in range(num_rows):
        memory.raw[memory.places[i], weight.start : weight.stop] = -np.inf
        if len(memory.processed):
            memory.processed[memory.places[i], weight.start : weight.stop] = -np.inf
    its = weight, rows, index, products, sums, head, memory, upper, logits, tops, reaching
    list_blocks(its, top_k, step, first, computed)


@jit()
def list_blocks(its, top_k, step, first, computed):
    """Do the work of `list_kept`, in memory that is there."""
    weight, rows, index, products, sums, head, memory, upper, logits, tops, reaching = its
    num_rows, plain, falls = len(index), is_plain(head), head.logit_scale < F32(0)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        fp32_products(weight, block, rows, products)
        total = 0
        for i in range(num_rows):
            upper_ends(products.values[i], products.errors[i], block, falls, upper[i])
            if not plain:
                end_logits(upper[i], block, index[i], head, 1)
            word = first[memory.places[i], 0]
            threshold = filter_threshold(word, top_k[i], tops[i], step[i])
            reaching[i] = 0
            for j in range(BLOCK):
                reaching[i] += not (upper[i, j] < threshold or upper[i, j] == F32(-np.inf))
            total += reaching[i]
        whole = num_rows > 1 and 4 * total > num_rows * block.count
        if whole:
            float64_products(weight, block, rows, sums)
            keep_products(weight, block, rows, sums, index, head, plain, memory, logits)
        for i in range(num_rows):
            if reaching[i] == 0:
                continue
            place = memory.places[i]
            threshold = filter_threshold(first[place, 0], top_k[i], tops[i], step[i])
            for j in range(block.lane, block.lane + block.count):
                if upper[i, j] == F32(-np.inf) or upper[i, j] < threshold:
                    continue
                computed[0 if products.proved[i] else 1, i] += 1
                v = block.local + j - block.lane
                if not whole and plain:
                    memory.raw[place, v] = exact_dot(
                        weight.numbers, v * weight.stride, rows.hidden[i]
                    )
                elif not whole:
                    raw, logit = exact_logits(weight, v, rows.hidden[i], index[i], head)
                    memory.raw[place, v] = raw
                    if len(memory.processed):
                        memory.processed[place, v] = logit
                last = memory.processed if len(memory.processed) else memory.raw
                logit = last[place, v]
                if top_k[i] > 0:
                    push(first[place], top_k[i], pack(logit, weight.first_id + v))
                tops[i] = max(tops[i], logit) if logit == logit else tops[i]
                threshold = filter_threshold(first[place, 0], top_k[i], tops[i], step[i])
