"""The passes over stored logits, row by row. Twin: `tpsample.logits.shard_logits`.

Every pass takes `Stored` and a range of its rows, and leaves rows that are done as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpsample.core.order import DIGIT_BITS, DIGITS, LOG2_E, TOP_MASS
from tpsample.native.compiling import jit
from tpsample.native.noise import BLOCK, exact_score, upper_scores
from tpsample.native.numbers import (
    F32,
    F64,
    I32,
    I64,
    KEY_MINUS_INF,
    TOKEN_BITS,
    U32,
    is_nan_word,
    pack,
    value_of,
)
from tpsample.native.power import power_of_2
from tpsample.screening.bound import NOISE_MAGNITUDE

LOWEST = I32(-(2**31))
MAGIC = 6755399441055744.0
"""1.5 · 2^52: adding it rounds a smaller number to an integer, ties to even."""


class Stored(NamedTuple):
    """Stored logits of F rows.

    Attributes:
        logits: fp32 [F, V_local].
        first_id: global id of the first column.
        temperature: fp32 [F], 1 for greedy rows.
        done: bool [F]; no rows where none is done.
    """

    logits: np.ndarray
    first_id: int
    temperature: np.ndarray
    done: np.ndarray


@jit()
def ordered(value):  # type: ignore[no-untyped-def]
    """Map fp32 to int32, keeping the order; a NaN is the largest, -0.0 is 0."""
    bits = F32(value + F32(0)).view(I32)
    if value != value:
        return I32(0x7FFFFFFF)
    return I32(bits ^ ((bits >> I32(31)) & I32(0x7FFFFFFF)))


@jit()
def order_word(key, token_id):  # type: ignore[no-untyped-def]
    """Return the order word of an `ordered` logit."""
    return ((I64(key) + I64(2**31)) << I64(TOKEN_BITS)) | (I64(2**TOKEN_BITS - 1) - I64(token_id))


@jit()
def push_word(heap, size, value):  # type: ignore[no-untyped-def]
    """Add a word to a heap of the `size` largest ones, the least first."""
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
def sort_words(heap, size):  # type: ignore[no-untyped-def]
    """Sort a heap with the least first into descending order."""
    for last in range(size - 1, 0, -1):
        value = heap[last]
        heap[last] = heap[0]
        at = 0
        while True:
            child = 2 * at + 1
            if child >= last:
                break
            if child + 1 < last and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= value:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = value


@jit(entry=True)
def first_words(stored, first, last, count, out):  # type: ignore[no-untyped-def]
    """Find the first `count` order words of rows, descending, out int64 [F, ≥ count]."""
    num_ids = stored.logits.shape[1]
    for row in range(first, last):
        if len(stored.done) and stored.done[row]:
            continue
        logits, heap = stored.logits[row], out[row]
        for base in range(0, num_ids, BLOCK):
            size, top = min(BLOCK, num_ids - base), LOWEST
            for j in range(size):
                top = max(top, ordered(logits[base + j]))
            if order_word(top, stored.first_id + base) <= heap[0]:
                continue
            for j in range(size):
                word = order_word(ordered(logits[base + j]), stored.first_id + base + j)
                push_word(heap, count, word)
        sort_words(heap, count)


@jit(entry=True)
def best_scores(stored, first, last, scale, random, streams, rounds, cut, count, out):  # type: ignore[no-untyped-def]
    """Find the `count` best score words of rows, descending.

    Args:
        scale, random: fp32 [F]; streams: uint32 [samples, F, 3].
        cut: int64 [F], the least order word that counts; no rows for all.
        out: int64 [F, samples, count], zeros.
    """
    logits, none, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    for j in range(BLOCK):
        none[j] = F32(0)
    words = np.empty((4, BLOCK // 4), U32)
    begin, end = stored.first_id, stored.first_id + stored.logits.shape[1]
    for row in range(first, last):
        if len(stored.done) and stored.done[row]:
            continue
        heat, is_random = scale[row], random[row]
        for base in range(begin & ~3, end, BLOCK):
            largest, proved = 0.0, True
            for j in range(BLOCK):
                logits[j] = F32(-np.inf)
                token_id = base + j
                if token_id < begin or token_id >= end:
                    continue
                logit = stored.logits[row, token_id - begin]
                if len(cut) and order_word(ordered(logit), token_id) < cut[row]:
                    continue
                logits[j] = logit
                size = abs(F64(logit)) * F64(heat)
                if logit != F32(-np.inf):
                    proved = proved and size <= 2.0**100
                    largest = max(largest, size)
            rounding = F32(2.0**-19 * (largest + NOISE_MAGNITUDE * F64(is_random)))
            for sample in range(out.shape[1]):
                heap = out[row, sample]
                stream = streams[sample, row]
                if proved:
                    top = upper_scores(
                        logits, none, F32(0), rounding, heat, is_random, stream, base >> 2, rounds,
                        words, upper,
                    )  # fmt: skip
                    if top == F32(-np.inf) or top < value_of(heap[0]):
                        continue
                for j in range(BLOCK):
                    if logits[j] == F32(-np.inf):
                        continue
                    if proved and upper[j] < value_of(heap[0]):
                        continue
                    if count == 1 and is_nan_word(heap[0]):
                        continue
                    score = exact_score(logits[j], base + j, heat, is_random, stream, rounds)
                    push_word(heap, count, pack(score, base + j))
        for sample in range(out.shape[1]):
            sort_words(out[row, sample], count)


@jit()
def weigh_block(logits, base, size, top, heat, mass, below):  # type: ignore[no-untyped-def]
    """Find y and q of `size` ids, float64 and int64; see `tpsample.core.order`."""
    for j in range(size):
        logit = logits[base + j]
        y = (F64(logit) - F64(top)) / F64(heat)
        y = 0.0 if logit == top else y
        below[j] = y
        exponent = y * LOG2_E
        exponent = exponent if exponent > -64.0 else -64.0
        # The product is at most 2^40, so the sum is rounded to an integer as `rint` does.
        q = power_of_2(exponent) * F64(TOP_MASS) + MAGIC
        mass[j] = F64(q).view(I64) - F64(MAGIC).view(I64)


@jit(entry=True)
def before(stored, first, last, top, marks, log_min_p, sums):  # type: ignore[no-untyped-def]
    """Weigh what stands before marks, and the total of which top_p is a share.

    Args:
        top: fp32 [F], largest logits of all ranks.
        marks: int64 [F, C], words; only greater ones come before.
        log_min_p: float64 [F], what is not in the total.
        sums: int64 [F, 2 C + 1], zeros: C masses, C numbers, the total.
    """
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    mass, below = np.empty(BLOCK, I64), np.empty(BLOCK, F64)
    for row in range(first, last):
        if len(stored.done) and stored.done[row]:
            continue
        logits, of_row, total = stored.logits[row], sums[row], I64(0)
        least = marks[row, 0]
        for c in range(num_marks):
            least = min(least, marks[row, c])
        minus_inf = (I64(KEY_MINUS_INF) + 1) << I64(TOKEN_BITS)
        for base in range(0, num_ids, BLOCK):
            size = min(BLOCK, num_ids - base)
            weigh_block(logits, base, size, top[row], stored.temperature[row], mass, below)
            for j in range(size):
                word = order_word(ordered(logits[base + j]), stored.first_id + base + j)
                if word >= minus_inf and below[j] >= log_min_p[row]:
                    total += mass[j]
                if word > least:
                    for c in range(num_marks):
                        if word > marks[row, c]:
                            of_row[c] += mass[j]
                            of_row[num_marks + c] += 1
        of_row[2 * num_marks] = total


@jit(entry=True)
def mass_from(stored, first, last, top, cut, sums):  # type: ignore[no-untyped-def]
    """Sum q and rint(-q y) of the words from `cut` on, int64 [F]; sums int64 [F, 2], zeros."""
    num_ids = stored.logits.shape[1]
    mass, below = np.empty(BLOCK, I64), np.empty(BLOCK, F64)
    for row in range(first, last):
        if len(stored.done) and stored.done[row]:
            continue
        logits, total, moment = stored.logits[row], I64(0), I64(0)
        for base in range(0, num_ids, BLOCK):
            size = min(BLOCK, num_ids - base)
            weigh_block(logits, base, size, top[row], stored.temperature[row], mass, below)
            for j in range(size):
                word = order_word(ordered(logits[base + j]), stored.first_id + base + j)
                if word >= cut[row]:
                    total += mass[j]
                    if mass[j] > 0:
                        moment += I64(np.rint(-F64(mass[j]) * below[j]))
        sums[row, 0] += total
        sums[row, 1] += moment


@jit(entry=True)
def count_from(stored, first, last, marks, counts):  # type: ignore[no-untyped-def]
    """Count the order words that are >= each of marks, int64 [F, C]; counts the same, zeros."""
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    for row in range(first, last):
        logits = stored.logits[row]
        least = marks[row, 0]
        for c in range(num_marks):
            least = min(least, marks[row, c])
        for v in range(num_ids):
            word = order_word(ordered(logits[v]), stored.first_id + v)
            if word >= least:
                for c in range(num_marks):
                    counts[row, c] += word >= marks[row, c]


@jit(entry=True)
def digits(stored, first, last, top, prefix, shift, weighs, bins):  # type: ignore[no-untyped-def]
    """Make the histogram of a digit; twin: `tpsample.logits.shard_logits.ShardLogits.digits`.

    Args:
        weighs: whether a token counts with its mass, or as one.
        bins: int64 [F, 64], zeros.
    """
    num_ids = stored.logits.shape[1]
    mass, below = np.empty(1, I64), np.empty(1, F64)
    for row in range(first, last):
        if len(stored.done) and stored.done[row]:
            continue
        logits = stored.logits[row]
        for v in range(num_ids):
            if not (logits[v] > F32(-np.inf)):
                continue
            word = order_word(ordered(logits[v]), stored.first_id + v)
            if word >> I64(shift + DIGIT_BITS) != prefix[row]:
                continue
            place = ~(word >> I64(shift)) & I64(DIGITS - 1)
            if weighs:
                weigh_block(logits, v, 1, top[row], stored.temperature[row], mass, below)
                bins[row, place] += mass[0]
            else:
                bins[row, place] += 1
