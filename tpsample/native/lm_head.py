"""Hidden states to words and logits, over one range of a shard, in one reading of the weights.

A block of 64 ids is multiplied by all rows in fp32. Bounds (`tpsample.screening.bound`) then say
which ids of the block can matter, and only for these the exact logit is computed, while the weights
of the block are still in the cache:

    draw          the ids whose bound of the score reaches the best exact score so far
    list_kept     the ids whose bound of the logit reaches the threshold of the row's filters
    store         all ids; products are summed in float64

A block without a proof, because a number is not finite or above 2^100, is computed exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.native.compiling import jit
from tpsample.native.head import control, is_plain, largest_bias, raw_logits, slack_terms
from tpsample.native.noise import BLOCK, exact_score, upper_scores
from tpsample.native.numbers import (
    F32,
    F64,
    I32,
    U32,
    UNIT_64,
    as_fp32,
    exact_dot,
    is_nan_word,
    pack,
    rounded,
    value_of,
)
from tpsample.native.products import COLUMNS, fp32_products, int8_products, multiply
from tpsample.screening.bound import NOISE_MAGNITUDE
from tpsample.screening.filter_bars import DOWN


class Weight(NamedTuple):
    """A range of a shard's weight rows.

    Attributes:
        numbers: flat, as `as_fp32` reads them; row v begins at v · stride.
        stride: numbers from one row to the next.
        first_id: global id of row 0.
        start, stop: the rows of the range.
    """

    numbers: np.ndarray
    stride: int
    first_id: int
    start: int
    stop: int


class Rows(NamedTuple):
    """Some rows of a step.

    Attributes:
        index: int64 [R], their places in the batch.
        hidden: fp32 [R or more, D]: R = 1, or a multiple of four with zeros behind.
        norms: float64 [R], the rows' norms, rounded up.
        scale, random: fp32 [≥ R]; streams: uint32 [≥ samples, ≥ R, 3]: see `row_noise`.
        samples: draws per row.
        rounds: of Philox.
    """

    index: np.ndarray
    hidden: np.ndarray
    norms: np.ndarray
    scale: np.ndarray
    random: np.ndarray
    streams: np.ndarray
    samples: int
    rounds: int


@jit()
def fill(values, first, last, value):  # type: ignore[no-untyped-def]
    """Set some places of an array."""
    for i in range(first, last):
        values[i] = value


@jit()
def in_float64(values):  # type: ignore[no-untyped-def]
    """Return a copy of fp32 [R, D] in float64."""
    out = np.empty(values.shape, F64)
    for i in range(values.shape[0]):
        for d in range(values.shape[1]):
            out[i, d] = values[i, d]
    return out


@jit(entry=True)
def take_rows(hidden, index, out, norms):  # type: ignore[no-untyped-def]
    """Copy some rows of the hidden states to `Rows.hidden` and find their norms."""
    for i in range(len(out)):
        squares = 0.0
        for d in range(out.shape[1]):
            out[i, d] = hidden[index[i], d] if i < len(index) else F32(0)
            squares += F64(out[i, d]) * F64(out[i, d])
        if i < len(index):
            norms[i] = math.sqrt(squares) * (1.0 + 2.0**-30)


@jit()
def exact_logits(weight, local, hidden, row, head):  # type: ignore[no-untyped-def]
    """Return the logits of one pair, before the controls and behind them."""
    logits = np.empty(1, F32)
    logits[0] = exact_dot(weight.numbers, local * weight.stride, hidden)
    raw_logits(logits, 0, 1, local, head, logits)
    raw = logits[0]
    control(logits, 0, 1, row, local, weight.first_id + local, head)
    return raw, logits[0]


@jit()
def approximate_logits(products, lane, count, local, row, token_id, head, logits):  # type: ignore[no-untyped-def]
    """Make fp32 [BLOCK] logits of approximate products as logits are made; -inf outside the range.

    Args:
        lane, count: places of the range in the block.
        local, token_id: column and global id of its first id.
    """
    if count < BLOCK:
        fill(logits, 0, BLOCK, F32(-np.inf))
    raw_logits(products, lane, count, local, head, logits)
    control(logits, lane, count, row, local, token_id, head)


@jit()
def largest_size(logits):  # type: ignore[no-untyped-def]
    """Return the largest absolute value of BLOCK logits, -inf left out; a NaN if there is one."""
    most = I32(0)
    for j in range(BLOCK):
        bits = F32(logits[j]).view(I32) & I32(0x7FFFFFFF)
        most = max(most, I32(0) if logits[j] == F32(-np.inf) else bits)
    return F64(I32(most).view(F32))


@jit()
def begin_empty(best, first_id):  # type: ignore[no-untyped-def]
    """Raise best to the word of a range whose ids are all masked, which is that of its first id."""
    least = pack(F32(-np.inf), first_id)
    for s in range(best.shape[0]):
        for i in range(best.shape[1]):
            best[s, i] = max(best[s, i], least)


@jit(entry=True)
def draw(weight, copy, rows, head, best, computed):  # type: ignore[no-untyped-def]
    """Raise best, int64 [samples, R], to the best words of a range of the shard.

    Args:
        copy: what is multiplied first in place of the weight, if it has any rows.
        computed: int64 [2, R], added to: how many exact logits a row took one by one, and in blocks
            without a proof.
    """
    num_rows = len(rows.index)
    products = np.empty((len(rows.hidden), BLOCK), F32)
    errors = np.empty((num_rows, BLOCK), F32)
    tile, squares = np.empty((BLOCK + 1, COLUMNS), F32), np.empty(BLOCK, F32)
    bounds, plain = np.empty((num_rows, 2), F64), is_plain(head)
    processed, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    words = np.empty((4, BLOCK // 4), U32)
    begin, end = weight.first_id + weight.start, weight.first_id + weight.stop
    begin_empty(best, begin)
    for base in range(begin & ~3, end, BLOCK):
        token_id = max(base, begin)
        lane, count = token_id - base, min(base + BLOCK, end) - token_id
        local = token_id - weight.first_id
        most_bias = largest_bias(local, count, head)
        if len(copy.hidden):
            int8_products(copy, local, count, lane, rows, products, errors, bounds)
        else:
            fp32_products(weight, local, count, lane, rows, tile, squares, products, errors, bounds)
        for i in range(num_rows):
            row = rows.index[i]
            scale, random = rows.scale[i], rows.random[i]
            noise = NOISE_MAGNITUDE * F64(random)
            gain, extra, proved = slack_terms(
                bounds[i, 0], bounds[i, 1], row, local, count, head, most_bias, F64(scale), noise
            )
            if not proved:
                computed[1, i] += count
                for j in range(lane, lane + count):
                    v = local + j - lane
                    logit = exact_logits(weight, v, rows.hidden[i], row, head)[1]
                    for s in range(rows.samples):
                        score = exact_score(
                            logit, token_id + j - lane, scale, random, rows.streams[s, i],
                            rows.rounds,
                        )  # fmt: skip
                        best[s, i] = max(best[s, i], pack(score, token_id + j - lane))
                continue
            logits = products[i]
            if not plain or count < BLOCK:
                logits = processed
                approximate_logits(products[i], lane, count, local, row, token_id, head, logits)
            for s in range(rows.samples):
                if is_nan_word(best[s, i]):
                    continue
                stream = rows.streams[s, i]
                top = upper_scores(
                    logits, errors[i], gain, extra, scale, random, stream, base >> 2, rows.rounds,
                    words, upper,
                )  # fmt: skip
                # The likeliest id first, because its score is the threshold for the others.
                for turn in range(2):
                    threshold = value_of(best[s, i])
                    if top == F32(-np.inf) or top < threshold:
                        break
                    for j in range(lane, lane + count):
                        if upper[j] < threshold or (turn == 0) != (upper[j] == top):
                            continue
                        v = local + j - lane
                        computed[0, i] += 1
                        logit = exact_logits(weight, v, rows.hidden[i], row, head)[1]
                        score = exact_score(logit, base + j, scale, random, stream, rows.rounds)
                        best[s, i] = max(best[s, i], pack(score, base + j))
                        threshold = value_of(best[s, i])


@jit(entry=True)
def draw_given(given, rows, sources, head, best):  # type: ignore[no-untyped-def]
    """Raise best, int64 [samples, R], by logits that are there already.

    Args:
        given: a `Weight` whose numbers are logits: row r begins at r · stride, column v is id
            first_id + v, and the range is one of columns.
        sources: int64 [R], the rows of `given`.
    """
    logits, none, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    fill(none, 0, BLOCK, F32(0))
    words = np.empty((4, BLOCK // 4), U32)
    begin, end = given.first_id + given.start, given.first_id + given.stop
    begin_empty(best, begin)
    for i in range(len(rows.index)):
        row, scale, random = rows.index[i], rows.scale[i], rows.random[i]
        for base in range(begin & ~3, end, BLOCK):
            token_id = max(base, begin)
            lane, count = token_id - base, min(base + BLOCK, end) - token_id
            if count < BLOCK:
                fill(logits, 0, BLOCK, F32(-np.inf))
            column = token_id - given.first_id
            part = given.numbers[sources[i] * given.stride + column :]
            for k in range(count):
                logits[lane + k] = as_fp32(part[k])
            control(logits, lane, count, row, column, token_id, head)
            largest = largest_size(logits) * F64(scale)
            proved = largest <= 2.0**100
            rounding = F32(2.0**-19 * (largest + NOISE_MAGNITUDE * F64(random)))
            for s in range(rows.samples):
                if is_nan_word(best[s, i]):
                    continue
                stream = rows.streams[s, i]
                if proved:
                    top = upper_scores(
                        logits, none, F32(0), rounding, scale, random, stream, base >> 2,
                        rows.rounds, words, upper,
                    )  # fmt: skip
                    if top == F32(-np.inf) or top < value_of(best[s, i]):
                        continue
                for j in range(lane, lane + count):
                    if proved and (upper[j] < value_of(best[s, i]) or logits[j] == F32(-np.inf)):
                        continue
                    score = exact_score(logits[j], base + j, scale, random, stream, rows.rounds)
                    best[s, i] = max(best[s, i], pack(score, base + j))


@jit(entry=True)
def store(weight, rows, places, head, raw, processed):  # type: ignore[no-untyped-def]
    """Store all logits of a range.

    Args:
        places: int64 [R], rows of the memory.
        raw, processed: fp32 [stored rows, V_local]; `processed` has no rows without controls.
    """
    hidden_size = rows.hidden.shape[1]
    hidden = in_float64(rows.hidden)
    products = np.empty((len(hidden), BLOCK), F64)
    tile, squares = np.empty((BLOCK + 1, COLUMNS), F64), np.empty(BLOCK, F64)
    for local in range(weight.start, weight.stop, BLOCK):
        count = min(BLOCK, weight.stop - local)
        store_block(
            weight, local, count, rows, hidden, places, head, tile, squares, products, raw,
            processed, hidden_size * UNIT_64 * 1.01,
        )  # fmt: skip


@jit(entry=True)
def store_given(given, rows, sources, places, head, raw, processed):  # type: ignore[no-untyped-def]
    """Store logits that are there already; arguments as in `draw_given` and `store`."""
    count = given.stop - given.start
    for i in range(len(rows.index)):
        begin, into = sources[i] * given.stride + given.start, raw[places[i], given.start :]
        for k in range(count):
            into[k] = as_fp32(given.numbers[begin + k])
        if len(processed):
            behind = processed[places[i], given.start :]
            for k in range(count):
                behind[k] = into[k]
            token_id = given.first_id + given.start
            control(behind, 0, count, rows.index[i], given.start, token_id, head)


@jit(entry=True)
def merge(best, index, words):  # type: ignore[no-untyped-def]
    """Raise words, int64 [samples, B], by the best words of several threads, [T, samples, R]."""
    for thread in range(best.shape[0]):
        for s in range(best.shape[1]):
            for i in range(len(index)):
                words[s, index[i]] = max(words[s, index[i]], best[thread, s, i])


@jit()
def store_block(  # type: ignore[no-untyped-def]
    weight, local, count, rows, hidden, places, head, tile, squares, products, raw, processed, unit
):
    """Store the exact logits of one block; undecided products are added exactly."""
    multiply(weight, local, count, 0, hidden, tile, products, squares)
    for j in range(count):
        squares[j] = math.sqrt(squares[j]) * unit
    for i in range(len(rows.index)):
        row, place, norm = rows.index[i], places[i], rows.norms[i]
        of_row, into, undecided = products[i], raw[place, local : local + count], 0
        for j in range(count):
            error = norm * squares[j]
            into[j] = F32(of_row[j])
            # A sum that is not finite counts as undecided, which is rare.
            undecided += F32(of_row[j] - error) != F32(of_row[j] + error)
        if undecided:
            for j in range(count):
                if not rounded(of_row[j], norm * squares[j])[1]:
                    first = (local + j) * weight.stride
                    into[j] = exact_dot(weight.numbers, first, rows.hidden[i])
        raw_logits(into, 0, count, local, head, into)
        if len(processed):
            behind = processed[place, local : local + count]
            for j in range(count):
                behind[j] = into[j]
            control(behind, 0, count, row, local, weight.first_id + local, head)


@jit()
def push_top(heap, size, value):  # type: ignore[no-untyped-def]
    """Add a value to a heap of the `size` largest ones, fp32 [≥ size], the least first."""
    if value <= heap[0]:
        return
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@jit()
def filter_threshold(heap, top_k, top, step):  # type: ignore[no-untyped-def]
    """Return what an upper bound of a logit must reach; twin: `tpsample.screening.filter_bars`.

    Args:
        heap: fp32 [≥ top_k], the largest logits so far, -inf where there are fewer.
        top_k: 0 without a bound by top_k.
        top: the largest logit so far.
        step: float64, T ln(min_p), -inf without a bound by min_p.
    """
    threshold = heap[0] if top_k > 0 else F32(-np.inf)
    if top > F32(-np.inf) and step > -np.inf:
        of_min_p = F64(top) + step - DOWN * (abs(F64(top)) - step) - 1e-30
        threshold = max(threshold, F32(of_min_p))
    return threshold


@jit(entry=True)
def list_kept(  # type: ignore[no-untyped-def]
    weight, rows, places, head, top_k, step, raw, processed, computed
):
    """Store the logits of a range that the rows' filters can keep, and -inf for the others.

    A block of which many are kept is stored whole, because that is cheaper than pair by pair.

    Args:
        places, raw, processed: as in `store`.
        top_k: int64 [R]; step: float64 [R], see `filter_threshold`.
        computed: as in `draw`.
    """
    num_rows, hidden_size = rows.hidden.shape[0], rows.hidden.shape[1]
    given = len(rows.index)
    products, errors = np.empty((num_rows, BLOCK), F32), np.empty((given, BLOCK), F32)
    tile, squares = np.empty((BLOCK + 1, COLUMNS), F32), np.empty(BLOCK, F32)
    bounds = np.empty((given, 2), F64)
    hidden_64 = np.empty((0, hidden_size), F64)
    products_64 = np.empty((num_rows, BLOCK), F64)
    tile_64, squares_64 = np.empty((BLOCK + 1, COLUMNS), F64), np.empty(BLOCK, F64)
    upper, logits = np.empty((given, BLOCK), F32), np.empty(BLOCK, F32)
    most = 1
    for i in range(given):
        most = max(most, top_k[i])
    heaps, tops = np.empty((given, most), F32), np.empty(given, F32)
    for i in range(given):
        tops[i] = F32(-np.inf)
        fill(heaps[i], 0, most, F32(-np.inf))
        fill(raw[places[i]], weight.start, weight.stop, F32(-np.inf))
        if len(processed):
            fill(processed[places[i]], weight.start, weight.stop, F32(-np.inf))
    for local in range(weight.start, weight.stop, BLOCK):
        count = min(BLOCK, weight.stop - local)
        token_id, reached = weight.first_id + local, 0
        most_bias = largest_bias(local, count, head)
        fp32_products(weight, local, count, 0, rows, tile, squares, products, errors, bounds)
        for i in range(given):
            row = rows.index[i]
            gain, extra, proved = slack_terms(
                bounds[i, 0], bounds[i, 1], row, local, count, head, most_bias, 1.0, 0.0
            )
            if not proved:
                upper[i, :] = F32(np.inf)
                reached += count
                continue
            approximate_logits(products[i], 0, count, local, row, token_id, head, logits)
            threshold = filter_threshold(heaps[i], top_k[i], tops[i], step[i])
            for j in range(count):
                upper[i, j] = logits[j] + (gain * errors[i, j] + extra)
                reached += upper[i, j] >= threshold
        if 4 * reached > given * count and given > 1:
            if len(hidden_64) == 0:
                hidden_64 = in_float64(rows.hidden)
            store_block(
                weight, local, count, rows, hidden_64, places, head, tile_64, squares_64,
                products_64, raw, processed, hidden_size * UNIT_64 * 1.01,
            )  # fmt: skip
        for i in range(given):
            row, place = rows.index[i], places[i]
            memory = processed if len(processed) else raw
            for j in range(count):
                v = local + j
                if upper[i, j] == F32(-np.inf):
                    continue
                if upper[i, j] < filter_threshold(heaps[i], top_k[i], tops[i], step[i]):
                    continue
                computed[int(upper[i, j] == F32(np.inf)), i] += 1
                if 4 * reached > given * count and given > 1:
                    logit = memory[place, v]
                else:
                    raw[place, v], logit = exact_logits(weight, v, rows.hidden[i], row, head)
                    if len(processed):
                        processed[place, v] = logit
                if top_k[i] > 0:
                    push_top(heaps[i], top_k[i], logit)
                tops[i] = max(tops[i], logit) if logit == logit else tops[i]
