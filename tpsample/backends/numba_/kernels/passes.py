"""The passes over stored logits, row by row. Twin: `tpsample.backends.torch_.passes`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, jit
from tpsample.backends.numba_.kernels.heap import push, sort
from tpsample.backends.numba_.kernels.inputs import BLOCK
from tpsample.backends.numba_.kernels.masses import mass_limit, mass_row, weigh_block, weigh_moments
from tpsample.backends.numba_.kernels.noise import exact_score, is_random, noise_of, stream_of
from tpsample.backends.numba_.kernels.numbers import (
    key_of,
    of_ordered,
    ordered,
    pack,
    value_of,
)
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.core import spread as twin
from tpsample.core.order import ABOVE_ALL, LARGEST
from tpsample.core.word import (
    KEY_MINUS_INF,
    KEY_NAN,
    LOWEST_DRAWABLE,
    TOKEN_BITS,
    TOKEN_MASK,
)

FARTHEST, UNITS, INTEGERS_FROM = F32(twin.FARTHEST), F32(twin.UNITS), F32(twin.INTEGERS_FROM)
HALF_BITS, LOW_HALF = twin.HALF_BITS, I64((1 << twin.HALF_BITS) - 1)


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


@jit(in_parts=True, allocates=True)
def own_words(start, stop, part, arguments):
    """Find the first n order words of rows, descending, and those of some ids.

    Args:
        listed: int64 [threads, F, m], the first order words of rows that the local step has listed,
            in any order; 0 in the others.
        token_ids: int64 [F, C]; those of other ranks, and -1, have the word 0.
        out: int64 [F, n + C], zeros.
    """
    stored, listed, token_ids, out = arguments
    num_ids, count = stored.logits.shape[1], out.shape[1] - token_ids.shape[1]
    words = np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, heap = stored.logits[row], out[row, :count]
        for c in range(token_ids.shape[1]):
            v = token_ids[row, c] - stored.first_id
            if 0 <= v < num_ids:
                out[row, count + c] = pack(logits[v], token_ids[row, c])
        if count == 0:
            continue
        largest = I64(0)
        for thread in range(len(listed)):
            for word in listed[thread, row]:
                push(heap, count, word)
                largest = larger(largest, word)
        if largest == 0:
            push_all(logits, stored.first_id, words, heap)
        sort(heap)


@jit()
def push_all(logits, first_id, words, heap):
    """Push the order words of a row's logits; words: int64 [BLOCK], of any content."""
    for base in range(0, len(logits), BLOCK):
        part = logits[base : base + BLOCK]
        if words_of_block(part, first_id + base, words) <= heap[0]:
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
        largest = larger(largest, words[j])
    return largest


@jit(entry=True)
def tops_of(gathered, words, top):
    """Find the first order words over all ranks, int64 [F], and their logits, fp32 [F].

    Args:
        gathered: int64 [W, F, n], of each rank; its words begin with the first one.
    """
    for i in range(len(words)):
        words[i] = gathered[0, i, 0]
        for rank in range(1, len(gathered)):
            words[i] = larger(words[i], gathered[rank, i, 0])
        top[i] = value_of(words[i])


@jit()
def least_word(top, temperature, y):
    """Return the least order word of a logit >= top + T · y. Twin: `tpsample.core.order`.

    Args:
        top, temperature: fp32.
        y: float64 <= 0.
    """
    exact = F64(top) + F64(temperature) * y if y > -np.inf else F64(-np.inf)
    exact = larger(exact, F64(-LARGEST))
    floor = F32(exact)
    least = of_ordered(I32(ordered(floor) + I32(1))) if floor < exact else floor
    return pack(least, TOKEN_MASK) if top > F32(-np.inf) else I64(ABOVE_ALL)


@jit(entry=True)
def least_words(top, temperature, y, out):
    """Find `least_word` of rows, int64 [F]."""
    for i in range(len(top)):
        out[i] = least_word(top[i], temperature[i], y[i])


@jit(inline=True)
def last_cut(top, temperature, least, of_greedy):
    """Return where a kept set ends; twin: `ShardLogits.last_cut`.

    Args:
        top: fp32, the largest logit.
        temperature: fp32, of the request: it says whether the row is greedy.
        least, of_greedy: int64, where the set ends of a row that is drawn, and of a greedy one.
    """
    cut = least if is_random(temperature) else of_greedy
    return cut if top > F32(-np.inf) else I64(ABOVE_ALL)


@jit(entry=True)
def last_cuts(top, temperature, least, of_greedy, out):
    """Find `last_cut` of rows, int64 [F]; of_greedy: int64 [F], or no rows for all tokens."""
    for i in range(len(top)):
        other = of_greedy[i] if len(of_greedy) else I64(LOWEST_DRAWABLE)
        out[i] = last_cut(top[i], temperature[i], least[i], other)


@jit(in_parts=True, allocates=True)
def weigh(start, stop, part, arguments):
    """Weigh what reaches marks, and the total.

    Args:
        top: fp32 [F], largest logits of all ranks.
        marks: int64 [F, C], order words; the words from them on count.
        totals: int64 [F], order words; the words from them on are in the total.
        sums: int64 [F, 2 C + 1], zeros: C masses Σ q, C numbers, the total.
    """
    stored, top, marks, totals, sums = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    power, mass, words = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, of_row, total = stored.logits[row], sums[row], I64(0)
        mass_numbers = mass_row(top[row], stored.temperature[row])
        least = marks[row].min()
        of_total = totals[row]
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            largest = words_of_block(part, stored.first_id + base, words)
            if largest < smaller(least, of_total):
                continue
            weigh_block(part, mass_numbers, power, mass)
            for j in range(len(part)):
                total += mass[j] if words[j] >= of_total else I64(0)
            if largest < least:
                continue
            for c in range(num_marks):
                mark, sum_mass, number = marks[row, c], I64(0), I64(0)
                if largest < mark:
                    continue
                for j in range(len(part)):
                    reaches = words[j] >= mark
                    sum_mass += mass[j] if reaches else I64(0)
                    number += reaches
                of_row[c] += sum_mass
                of_row[num_marks + c] += number
        of_row[2 * num_marks] = total


@jit(in_parts=True, allocates=True)
def moment_from(start, stop, part, arguments):
    """Sum the masses and moments of what reaches a cut, and count what reaches marks.

    Args:
        cut: int64 [F]; marks: int64 [F, C].
        sums: int64 [F, 2 + C], zeros.
    """
    stored, top, cut, marks, sums = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    mass, moment, words = np.empty(BLOCK, I64), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    parts, whole = np.empty((2, BLOCK), F32), np.empty(BLOCK, I32)
    for row in stored.rows[start:stop]:
        logits, of_row, least = stored.logits[row], sums[row], cut[row]
        mass_numbers = mass_row(top[row], stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            largest = words_of_block(part, stored.first_id + base, words)
            for c in range(num_marks):
                mark, number = marks[row, c], I64(0)
                if largest < mark:
                    continue
                for j in range(len(part)):
                    number += words[j] >= mark
                of_row[2 + c] += number
            if largest < least:
                continue
            weigh_moments(part, mass_numbers, parts, whole, mass, moment)
            sum_mass, sum_moment = I64(0), I64(0)
            for j in range(len(part)):
                reaches = words[j] >= least
                sum_mass += mass[j] if reaches else I64(0)
                sum_moment += moment[j] if reaches else I64(0)
            of_row[0] += sum_mass
            of_row[1] += sum_moment


@jit(in_parts=True, allocates=True)
def least_of_mass(start, stop, part, arguments):
    """Lower words, int64 [F], to the least order word of a mass that reaches limits, int64 [F]."""
    stored, top, limits, least = arguments
    num_ids = stored.logits.shape[1]
    power, mass = np.empty(BLOCK, F32), np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, limit, least_word = stored.logits[row], limits[row], least[row]
        mass_numbers = mass_row(top[row], stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            weigh_block(part, mass_numbers, power, mass)
            for j in range(len(part)):
                if mass[j] >= limit and part[j] > F32(-np.inf):
                    least_word = smaller(least_word, pack(part[j], stored.first_id + base + j))
        least[row] = least_word


@jit(in_parts=True)
def spread(start, stop, part, arguments):
    """Sum the distances from the largest logit, int64 [F, 4]; see `tpsample.core.spread`."""
    stored, top, sums = arguments
    for row in stored.rows[start:stop]:
        logits, largest, of_row = stored.logits[row], top[row], sums[row]
        for v in range(len(logits)):
            if not logits[v] > F32(-np.inf):
                continue
            distance = F32(0) if logits[v] == largest else F32(largest - logits[v])
            units = F32(smaller(distance, FARTHEST) * UNITS)
            if units < INTEGERS_FROM:
                units = F32(F32(units + INTEGERS_FROM) - INTEGERS_FROM)
            d = I64(units)
            square = d * d
            of_row[0] += 1
            of_row[1] += d
            of_row[2] += square >> I64(HALF_BITS)
            of_row[3] += square & LOW_HALF


@jit()
def keep_first(first, top_k, share, least, least_of_total, given, mass, kept):
    """Note which of a row's first tokens its filters keep.

    Args:
        first: int64 [n], order words, descending; mass: int64 [n].
        top_k, share, least, least_of_total: of `tpsample.request.filters.Thresholds`.
        given: the total, or -1.
        kept: bool [n].
    """
    total, before, last = I64(0), I64(0), smaller(len(first), top_k)
    for j in range(last):
        total += mass[j] if first[j] >= least_of_total else I64(0)
    total = given if given >= 0 else total
    limit = mass_limit(total, share)
    is_nan = key_of(first[0]) == KEY_NAN
    for j in range(len(first)):
        kept[j] = j < last and first[j] >= least and before < limit and not is_nan
        before += mass[j]


@jit(in_parts=True, allocates=True)
def set_of_first(start, stop, part, arguments):
    """Find the kept sets of rows among their first tokens, and the best scores in them.

    Args:
        first: int64 [F, n], order words, descending.
        temperature: fp32 [F].
        limits: the first four of `tpsample.request.filters.Thresholds`, [F] each, and the total,
            [F] or no rows.
        words, drawn: int64 [F, samples], zeros, as in `SetOfFirst`; and so are
        top: fp32 [F], and held: int64 [F, 2], zeros.
        last: int64 [F], the last kept words; above all words without any.
    """
    first, temperature, limits, draws, words, drawn, held, top, last = arguments
    num_rows, count = first.shape
    most, shares, least, least_of_total, totals = limits
    noise, logits = noise_of(draws, np.arange(num_rows)), np.empty(count, F32)
    power, mass, kept = np.empty(count, F32), np.empty(count, I64), np.empty(count, np.bool_)
    for i in range(start, stop):
        for j in range(count):
            logits[j] = value_of(first[i, j])
        weigh_block(logits, mass_row(logits[0], temperature[i]), power, mass)
        given = totals[i] if len(totals) else I64(-1)
        row_limits = most[i], shares[i], least[i], least_of_total[i], given
        keep_first(first[i], *row_limits, mass, kept)
        top[i], last[i] = logits[0], ABOVE_ALL
        for j in range(count):
            if not kept[j]:
                continue
            last[i] = first[i, j]
            held[i, 0] += mass[j]
            held[i, 1] += 1
            token_id = I64(TOKEN_MASK) - (first[i, j] & I64(TOKEN_MASK))
            for s in range(draws.samples):
                score = exact_score(logits[j], token_id, stream_of(noise, i, s))
                word = pack(score, token_id)
                if word > words[i, s]:
                    words[i, s] = word
                    drawn[i, s] = first[i, j] if key_of(word) > KEY_MINUS_INF else I64(0)
        if key_of(first[i, 0]) == KEY_NAN:
            words[i] = I64(KEY_NAN) << I64(TOKEN_BITS)
