"""Hidden states to the logits of the first tokens of each row, from upper ends of all logits.

Upper ends of a part of the shard are stored first. The k-th largest of them says which ids can be
among the part's first k tokens. Only these get their exact logits, while the others are left out.
"""

from __future__ import annotations

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, U32, U64, jit
from tpsample.backends.numba_.kernels.head import (
    changes_block,
    end_logits,
    exact_logits,
    lower_ends,
    plain_rows,
    slack_of,
    up,
    upper_ends,
)
from tpsample.backends.numba_.kernels.inputs import (
    BLOCK,
    block_at,
    blocks_of,
    part_of,
    put,
    take_rows,
)
from tpsample.backends.numba_.kernels.noise import heated
from tpsample.backends.numba_.kernels.numbers import (
    lanes_reaching,
    lowest_lane,
    number_of,
    of_ordered,
    ordered,
)
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.backends.numba_.kernels.products import (
    float64_products,
    fp32_products,
    products_of,
)
from tpsample.backends.numba_.kernels.store import (
    filter_threshold,
    is_cheaper_whole,
    keep_products,
)

KEY_BITS = 11
"""Bits of a key that one histogram tells apart; two histograms find a number within 2^-13 of it."""


@jit()
def key_of_end(end):
    """Return the bits of an fp32 number as an integer of the same order; a NaN has the largest."""
    return U32(I64(ordered(end)) + I64(2**31))


@jit()
def near_largest(ends, count, bins):
    """Return a number that at least `count` of these ends reach, and few others.

    It is a NaN, below which nothing lies, if there are fewer ends, or as many that are NaN.

    Args:
        ends: fp32; a NaN counts as the largest.
        bins: int64 [2^KEY_BITS], of any content.
    """
    prefix, left = U32(0), count
    for turn in range(1, 3):
        shift = U32(32 - KEY_BITS * turn)
        bins[:] = 0
        for v in range(len(ends)):
            key = key_of_end(ends[v]) >> shift
            if turn == 1 or key >> U32(KEY_BITS) == prefix:
                bins[key & U32(2**KEY_BITS - 1)] += 1
        digit = 2**KEY_BITS - 1
        while digit > 0 and bins[digit] < left:
            left -= bins[digit]
            digit -= 1
        prefix = U32((prefix << U32(KEY_BITS)) | U32(digit))
    return of_ordered(I32(I64(prefix << U32(32 - 2 * KEY_BITS)) - I64(2**31)))


@jit(in_parts=True, allocates=True)
def store_first(start, stop, part, arguments):
    """Store the logits of the first tokens of a range, and -inf for the others.

    A block of many first tokens is stored whole; see `store.is_cheaper_whole`.

    Args:
        weight, hidden, index, head, memory, computed: as in `draw.draw`.
        top_k: int64 [R] >= 1; temperature, y: as in `store.list_kept`.
    """
    weight, hidden, index, head, memory, top_k, temperature, y, computed = arguments
    weight, rows = part_of(weight, start, stop), take_rows(hidden, index)
    step = heated(temperature, index, y)
    products, plain = products_of(rows, F32), plain_rows(head, index)
    sums, reaching = products_of(rows, F64), np.empty(len(index), U64)
    upper, lower = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    error_bound, bins = np.zeros(len(index), F32), np.empty(2**KEY_BITS, I64)
    stored = memory.processed if len(memory.processed) else memory.raw
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        fp32_products(weight, block, rows, products)
        for i in range(len(index)):
            upper_ends(products.values[i], products.errors[i], upper)
            lower_ends(products.values[i], products.errors[i], lower)
            if changes_block(plain[i], head, index[i], block):
                end_logits(upper, block, index[i], head, F32(1))
                end_logits(lower, block, index[i], head, F32(-1))
            error_bound[i] = larger(error_bound[i], slack_of(upper, lower, block))
            put(upper, block, stored[memory.stored_rows[i]])
    thresholds, is_nan = np.empty(len(index), F32), np.zeros(len(index), np.bool_)
    for i in range(len(index)):
        ends = stored[memory.stored_rows[i], weight.start : weight.stop]
        # As many logits reach the k-th largest end less the error bound.
        bound = -up(error_bound[i] - near_largest(ends, top_k[i], bins))
        top = -up(error_bound[i] - ends.max())
        thresholds[i] = filter_threshold(bound, top_k[i], top, step[i])
    # The rows take turns block by block, because a block of weights stays in the cache.
    for n in range(blocks_of(weight)):
        block, pairs = block_at(weight, n), 0
        for i in range(len(index)):
            raw, ends = memory.raw[memory.stored_rows[i]], stored[memory.stored_rows[i]]
            upper[:] = -np.inf
            for k in range(block.count):
                upper[k] = ends[block.local + k]
                raw[block.local + k] = ends[block.local + k] = -np.inf
            lanes = lanes_reaching(upper, thresholds[i], ~U64(0))
            reaching[i] = U64(0) if is_nan[i] else lanes  # a row with a NaN has no token
            pairs += number_of(reaching[i])
        whole = is_cheaper_whole(block, len(index), pairs)
        if whole:
            float64_products(weight, block, rows, sums)
            keep_products(weight, block, rows, sums, index, head, plain, memory, upper)
        for i in range(len(index)):
            raw, ends = memory.raw[memory.stored_rows[i]], stored[memory.stored_rows[i]]
            lanes = reaching[i]
            while lanes and not is_nan[i]:
                v = block.local + lowest_lane(lanes)
                lanes &= lanes - U64(1)
                if not whole:
                    raw[v], ends[v] = exact_logits(weight, v, rows.hidden[i], index[i], head)
                computed[part, 1 if whole else 0, i] += 1
                is_nan[i] = ends[v] != ends[v]
