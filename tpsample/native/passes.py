"""The passes over stored logits, row by row. Twin: `tpsample.logits.shard_logits`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.core.order import DIGIT_BITS, DIGITS, LOG2_E, TOP_MASS
from tpsample.core.word import KEY_NAN, LOWEST_DRAWABLE, TOKEN_BITS, TOKEN_MASK
from tpsample.native.compiling import F32, F64, I64, jit
from tpsample.native.heap import push
from tpsample.native.inputs import BLOCK
from tpsample.native.noise import exact_score, noise_of, stream_of
from tpsample.native.numbers import (
    INTEGER,
    key_of,
    pack,
    power_of_2,
    value_of,
)
from tpsample.native.threads import share


class Stored(NamedTuple):
    """Stored logits of F rows.

    Attributes:
        logits: fp32 [F, V_local].
        first_id: global id of the first column.
        temperature: fp32 [F], 1 for greedy rows.
        rows: int64, the rows that a pass looks at.
    """

    logits: np.ndarray
    first_id: int
    temperature: np.ndarray
    rows: np.ndarray


@jit(entry=True)
def first_words(start, stop, parts, threads, arguments):
    """Do `first_words_of_rows` for each part of the rows; see `tpsample.native.threads`."""
    share(first_words_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def first_words_of_rows(start, stop, part, arguments):
    """Find the first order words of rows, int64 [F, count], the last of them first."""
    stored, out = arguments
    num_ids, words = stored.logits.shape[1], np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, heap = stored.logits[row], out[row]
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            if words_of_block(part, stored.first_id + base, words) <= heap[0]:
                continue
            for j in range(len(part)):
                if words[j] > heap[0]:
                    push(heap, len(heap), words[j])


@jit()
def words_of_block(logits, first_id, words):
    """Find the order words of the logits of neighbouring ids; return the largest."""
    largest = I64(0)
    for j in range(len(logits)):
        words[j] = pack(logits[j], first_id + j)
        largest = max(largest, words[j])
    return largest


@jit()
def weigh_block(logits, top, heat, mass, below):
    """Find y and q of some logits, float64 and int64; see `tpsample.core.order`."""
    for j in range(len(logits)):
        logit = logits[j]
        y = (F64(logit) - F64(top)) / F64(heat)
        y = 0.0 if logit == top else y
        below[j] = y
        exponent = y * LOG2_E
        exponent = exponent if exponent > -64.0 else -64.0
        mass[j] = whole(power_of_2(exponent) * F64(TOP_MASS))


@jit()
def whole(value):
    """Return a float64 number below 2^51 rounded to an integer, as `rint` does."""
    return F64(value + INTEGER).view(I64) - F64(INTEGER).view(I64)


@jit(entry=True)
def weigh(start, stop, parts, threads, arguments):
    """Do `weigh_of_rows` for each part of the rows; see `tpsample.native.threads`."""
    share(weigh_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def weigh_of_rows(start, stop, part, arguments):
    """Weigh what reaches marks, and the total that top_p takes a share of.

    Args:
        top: fp32 [F], largest logits of all ranks.
        marks: int64 [F, C], order words; the words from them on count.
        log_min_p: float64 [F]; below it nothing is in the total, and no masked token is.
        sums: int64 [F, 3 C + 1], zeros: C masses Σ q, C numbers, C sums of rint(-q y), the total.
    """
    stored, top, marks, log_min_p, sums = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    mass, below, words = np.empty(BLOCK, I64), np.empty(BLOCK, F64), np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, of_row, total = stored.logits[row], sums[row], I64(0)
        least, limit = marks[row].min(), log_min_p[row]
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            largest = words_of_block(part, stored.first_id + base, words)
            if largest < min(least, LOWEST_DRAWABLE):
                continue
            weigh_block(part, top[row], stored.temperature[row], mass, below)
            for j in range(len(part)):
                counts = (words[j] >= I64(LOWEST_DRAWABLE)) & (below[j] >= limit)
                total += mass[j] if counts else I64(0)
            if largest < least:
                continue
            for c in range(num_marks):
                mark, sum_mass, number, moment = marks[row, c], I64(0), I64(0), I64(0)
                for j in range(len(part)):
                    reaches = words[j] >= mark
                    sum_mass += mass[j] if reaches else I64(0)
                    number += reaches
                    weighs = reaches and mass[j] > 0
                    moment += whole(-F64(mass[j]) * below[j]) if weighs else I64(0)
                of_row[c] += sum_mass
                of_row[num_marks + c] += number
                of_row[2 * num_marks + c] += moment
        of_row[3 * num_marks] = total


@jit(entry=True)
def count_from(start, stop, parts, threads, arguments):
    """Do `count_from_of_rows` for each part of the rows; see `tpsample.native.threads`."""
    share(count_from_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def count_from_of_rows(start, stop, part, arguments):
    """Count the order words that are >= each of marks, int64 [F, C]; counts the same, zeros."""
    stored, marks, counts = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    for row in stored.rows[start:stop]:
        logits, least = stored.logits[row], marks[row].min()
        for v in range(num_ids):
            word = pack(logits[v], stored.first_id + v)
            if word >= least:
                for c in range(num_marks):
                    counts[row, c] += word >= marks[row, c]


@jit(entry=True)
def best_of_first(start, stop, parts, threads, arguments):
    """Do `best_of_first_rows` for each part of the rows; see `tpsample.native.threads`."""
    share(best_of_first_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def best_of_first_rows(start, stop, part, arguments):
    """Find the best score words among the first tokens of rows that their filters keep.

    Args:
        first: int64 [F, n], order words, descending.
        temperature: fp32 [F].
        limits: of the filters: top_k, total_log_min_p, log_min_p and top_p, [F] each.
        out: int64 [F, samples], zeros.
    """
    first, temperature, limits, draws, out = arguments
    num_rows, count = first.shape
    top_k, total_log_min_p, log_min_p, top_p = limits
    noise, logits = noise_of(draws, np.arange(num_rows)), np.empty(count, F32)
    mass, below = np.empty(count, I64), np.empty(count, F64)
    for i in range(start, stop):
        for j in range(count):
            logits[j] = value_of(first[i, j])
        weigh_block(logits, logits[0], temperature[i], mass, below)
        total, before, last = I64(0), I64(0), min(count, top_k[i])
        for j in range(last):
            if first[i, j] >= I64(LOWEST_DRAWABLE) and below[j] >= total_log_min_p[i]:
                total += mass[j]
        limit = I64(math.ceil(F64(total) * top_p[i])) if top_p[i] < 1.0 else I64(2**62)
        for j in range(last):
            word, kept = first[i, j], below[j] >= log_min_p[i] and before < limit
            before += mass[j]
            if not kept or word < I64(LOWEST_DRAWABLE):
                continue
            token_id = I64(TOKEN_MASK) - (word & I64(TOKEN_MASK))
            for s in range(draws.samples):
                score = exact_score(logits[j], token_id, stream_of(noise, i, s))
                out[i, s] = max(out[i, s], pack(score, token_id))
        if key_of(first[i, 0]) == KEY_NAN:
            out[i] = I64(KEY_NAN) << I64(TOKEN_BITS)


@jit(entry=True)
def digits(start, stop, parts, threads, arguments):
    """Do `digits_of_rows` for each part of the rows; see `tpsample.native.threads`."""
    share(digits_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def digits_of_rows(start, stop, part, arguments):
    """Make the histogram of a digit; twin: `tpsample.logits.shard_logits.ShardLogits.digits`.

    Args:
        weighs: whether a token counts with its mass, or as one.
        bins: int64 [F, 64], zeros.
    """
    stored, top, prefix, shift, weighs, bins = arguments
    num_ids = stored.logits.shape[1]
    mass, below, words = np.ones(BLOCK, I64), np.empty(BLOCK, F64), np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits = stored.logits[row]
        for base in range(0, num_ids, BLOCK):
            part, found = logits[base : base + BLOCK], 0
            words_of_block(part, stored.first_id + base, words)
            for j in range(len(part)):
                counts = part[j] > F32(-np.inf)
                counts &= words[j] >> I64(shift + DIGIT_BITS) == prefix[row]
                words[j] = words[j] if counts else I64(0)
                found += counts
            if not found:
                continue
            if weighs:
                weigh_block(part, top[row], stored.temperature[row], mass, below)
            for j in range(len(part)):
                if words[j] > 0:
                    bins[row, ~(words[j] >> I64(shift)) & I64(DIGITS - 1)] += mass[j]
