"""The passes over stored logits, row by row. Twin: `tpsample.backends.torch_.passes`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, jit
from tpsample.backends.numba_.kernels.heap import push
from tpsample.backends.numba_.kernels.inputs import BLOCK
from tpsample.backends.numba_.kernels.masses import mass_row, weigh_block, weigh_moments
from tpsample.backends.numba_.kernels.noise import exact_score, noise_of, stream_of
from tpsample.backends.numba_.kernels.numbers import key_of, pack, value_of
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.backends.numba_.kernels.threads import share
from tpsample.core import order
from tpsample.core import spread as twin
from tpsample.core.order import DIGIT_BITS, DIGITS
from tpsample.core.word import EPOCH_SHIFT, KEY_NAN, TOKEN_BITS, TOKEN_MASK

FARTHEST, UNITS, INTEGERS_FROM = F32(twin.FARTHEST), F32(twin.UNITS), F32(twin.INTEGERS_FROM)
BINS_PER_Y, LARGEST, LAST_BIN = F32(order.BINS_PER_Y), F32(order.LARGEST), F32(order.BINS - 1)
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


@jit(entry=True)
def first_words(start, stop, parts, threads, arguments):
    """Do `first_words_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
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


@jit(entry=True)
def words_from(start, stop, parts, threads, arguments):
    """Do `words_from_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(words_from_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def words_from_of_rows(start, stop, part, arguments):
    """Find the order words of rows that reach cuts, int64 [F], in the order of their ids.

    Args:
        out: int64 [F, count], zeros; as many words of a row as there is room for.
    """
    stored, cut, out = arguments
    num_ids, room, words = stored.logits.shape[1], out.shape[1], np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, least, number = stored.logits[row], cut[row], I64(0)
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            if words_of_block(part, stored.first_id + base, words) < least:
                continue
            for j in range(len(part)):
                if words[j] >= least and number < room:
                    out[row, number] = words[j]
                    number += 1


@jit()
def words_of_block(logits, first_id, words):
    """Find the order words of the logits of neighbouring ids; return the largest."""
    largest = I64(0)
    for j in range(len(logits)):
        words[j] = pack(logits[j], first_id + j)
        largest = larger(largest, words[j])
    return largest


@jit(entry=True)
def weigh(start, stop, parts, threads, arguments):
    """Do `weigh_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(weigh_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def weigh_of_rows(start, stop, part, arguments):
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
        its = mass_row(top[row], stored.temperature[row])
        least = marks[row].min()
        of_total = totals[row]
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            largest = words_of_block(part, stored.first_id + base, words)
            if largest < smaller(least, of_total):
                continue
            weigh_block(part, its, power, mass)
            for j in range(len(part)):
                total += mass[j] if words[j] >= of_total else I64(0)
            if largest < least:
                continue
            for c in range(num_marks):
                mark, sum_mass, number = marks[row, c], I64(0), I64(0)
                for j in range(len(part)):
                    reaches = words[j] >= mark
                    sum_mass += mass[j] if reaches else I64(0)
                    number += reaches
                of_row[c] += sum_mass
                of_row[num_marks + c] += number
        of_row[2 * num_marks] = total


@jit(entry=True)
def mass_from(start, stop, parts, threads, arguments):
    """Do `mass_from_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(mass_from_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def mass_from_of_rows(start, stop, part, arguments):
    """Sum the masses and moments of what reaches a cut, int64 [F]; sums: int64 [F, 2], zeros."""
    stored, top, cut, sums = arguments
    num_ids = stored.logits.shape[1]
    mass, moment, words = np.empty(BLOCK, I64), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    parts, whole = np.empty((2, BLOCK), F32), np.empty(BLOCK, I32)
    for row in stored.rows[start:stop]:
        logits, of_row, least = stored.logits[row], sums[row], cut[row]
        its = mass_row(top[row], stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            if words_of_block(part, stored.first_id + base, words) < least:
                continue
            weigh_moments(part, its, parts, whole, mass, moment)
            sum_mass, sum_moment = I64(0), I64(0)
            for j in range(len(part)):
                reaches = words[j] >= least
                sum_mass += mass[j] if reaches else I64(0)
                sum_moment += moment[j] if reaches else I64(0)
            of_row[0] += sum_mass
            of_row[1] += sum_moment


@jit(entry=True)
def least_of_mass(start, stop, parts, threads, arguments):
    """Do `least_of_mass_of_rows` for each part of the rows; see
    `tpsample.backends.numba_.kernels.threads`."""
    share(least_of_mass_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def least_of_mass_of_rows(start, stop, part, arguments):
    """Lower words, int64 [F], to the least order word of a mass that reaches limits, int64 [F]."""
    stored, top, limits, least = arguments
    num_ids = stored.logits.shape[1]
    power, mass = np.empty(BLOCK, F32), np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, limit, found = stored.logits[row], limits[row], least[row]
        its = mass_row(top[row], stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            weigh_block(part, its, power, mass)
            for j in range(len(part)):
                if mass[j] >= limit and part[j] > F32(-np.inf):
                    found = smaller(found, pack(part[j], stored.first_id + base + j))
        least[row] = found


@jit(entry=True)
def spread(start, stop, parts, threads, arguments):
    """Do `spread_of_rows` for each part of the rows; see
    `tpsample.backends.numba_.kernels.threads`."""
    share(spread_of_rows, start, stop, parts, threads, arguments)


@jit()
def spread_of_rows(start, stop, part, arguments):
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


@jit(entry=True)
def count_from(start, stop, parts, threads, arguments):
    """Do `count_from_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(count_from_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def count_from_of_rows(start, stop, part, arguments):
    """Count the order words that are >= each of marks, int64 [F, C]; counts the same, zeros."""
    stored, marks, counts = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    words = np.empty(BLOCK, I64)
    for row in stored.rows[start:stop]:
        logits, least = stored.logits[row], marks[row].min()
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            if words_of_block(part, stored.first_id + base, words) < least:
                continue
            for c in range(num_marks):
                mark, number = marks[row, c], I64(0)
                for j in range(len(part)):
                    number += words[j] >= mark
                counts[row, c] += number


@jit(entry=True)
def best_of_first(start, stop, parts, threads, arguments):
    """Do `best_of_first_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(best_of_first_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def best_of_first_rows(start, stop, part, arguments):
    """Find the best score words among the first tokens of rows that their filters keep.

    Args:
        first: int64 [F, n], order words, descending.
        temperature: fp32 [F].
        limits: the first four of `tpsample.request.filters.Thresholds`, [F] each.
        out: int64 [F, samples], zeros.
    """
    first, temperature, limits, draws, out = arguments
    num_rows, count = first.shape
    most, shares, least, least_of_total = limits
    noise, logits = noise_of(draws, np.arange(num_rows)), np.empty(count, F32)
    power, mass = np.empty(count, F32), np.empty(count, I64)
    for i in range(start, stop):
        for j in range(count):
            logits[j] = value_of(first[i, j])
        top, heat = logits[0], temperature[i]
        weigh_block(logits, mass_row(top, heat), power, mass)
        total, before, last = I64(0), I64(0), smaller(count, most[i])
        for j in range(last):
            total += mass[j] if first[i, j] >= least_of_total[i] else I64(0)
        limit = I64(math.ceil(F64(total) * shares[i])) if shares[i] < 1.0 else I64(2**62)
        for j in range(last):
            kept = first[i, j] >= least[i] and before < limit
            before += mass[j]
            if not kept:
                continue
            token_id = I64(TOKEN_MASK) - (first[i, j] & I64(TOKEN_MASK))
            for s in range(draws.samples):
                score = exact_score(logits[j], token_id, stream_of(noise, i, s))
                out[i, s] = larger(out[i, s], pack(score, token_id))
        if key_of(first[i, 0]) == KEY_NAN:
            out[i] = I64(KEY_NAN) << I64(TOKEN_BITS)


@jit()
def values_of_prefix(prefix, shift):
    """Return the least and the largest fp32 number of words that begin with a prefix."""
    if shift >= EPOCH_SHIFT:
        return F32(-np.inf), F32(np.inf)
    return value_of(prefix << I64(shift)), value_of(((prefix + I64(1)) << I64(shift)) - I64(1))


@jit(entry=True)
def digits(start, stop, parts, threads, arguments):
    """Do `digits_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(digits_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def digits_of_rows(start, stop, part, arguments):
    """Make the histogram of a digit; twin: `tpsample.backends.torch_.passes.ShardLogits.digits`.

    Args:
        weighs: whether a token counts with its mass, or as one.
        bins: int64 [F, 64], zeros.
    """
    stored, top, prefix, shift, weighs, bins = arguments
    num_ids = stored.logits.shape[1]
    power, mass, words = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    mass[:] = 1
    for row in stored.rows[start:stop]:
        logits, its = stored.logits[row], mass_row(top[row], stored.temperature[row])
        lowest, highest = values_of_prefix(prefix[row], shift + DIGIT_BITS)
        for base in range(0, num_ids, BLOCK):
            part, near, found = logits[base : base + BLOCK], I32(0), 0
            for j in range(len(part)):  # a NaN is near every number
                near += I32(not (part[j] < lowest or part[j] > highest))
            if not near:
                continue
            words_of_block(part, stored.first_id + base, words)
            for j in range(len(part)):
                counts = part[j] > F32(-np.inf)
                counts &= words[j] >> I64(shift + DIGIT_BITS) == prefix[row]
                words[j] = words[j] if counts else I64(0)
                found += counts
            if not found:
                continue
            if weighs:
                weigh_block(part, its, power, mass)
            for j in range(len(part)):
                if words[j] > 0:
                    bins[row, ~(words[j] >> I64(shift)) & I64(DIGITS - 1)] += mass[j]


@jit()
def bins_of_block(logits, top, per_logit, bins):
    """Find the bins of the logits of neighbouring ids; -1 where a token is masked."""
    for j in range(len(logits)):
        steps = F32(0) if logits[j] == top else F32(F32(top - logits[j]) * per_logit)
        found = I32(steps if steps < LAST_BIN else LAST_BIN)
        bins[j] = found if logits[j] > F32(-np.inf) else I32(-1)


@jit()
def bins_per_logit(temperature):
    return smaller(F32(BINS_PER_Y / temperature), LARGEST)


@jit(entry=True)
def bins(start, stop, parts, threads, arguments):
    """Do `bins_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(bins_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def bins_of_rows(start, stop, part, arguments):
    """Make the histogram of the bins; twin: `tpsample.backends.torch_.passes.ShardLogits.bins`.

    Args:
        weighs: whether a token counts with its mass, or as one.
        out: int64 [F, BINS], zeros.
    """
    stored, top, weighs, out = arguments
    num_ids = stored.logits.shape[1]
    power, mass, bins = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I32)
    mass[:] = 1
    for row in stored.rows[start:stop]:
        logits, its = stored.logits[row], mass_row(top[row], stored.temperature[row])
        per_logit = bins_per_logit(stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            bins_of_block(part, top[row], per_logit, bins)
            if weighs:
                weigh_block(part, its, power, mass)
            for j in range(len(part)):
                if bins[j] >= 0:
                    out[row, bins[j]] += mass[j]


@jit(entry=True)
def words_of_bin(start, stop, parts, threads, arguments):
    """Do `words_of_bin_of_rows` for each part of the rows; see
    `tpsample.backends.numba_.kernels.threads`."""
    share(words_of_bin_of_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def words_of_bin_of_rows(start, stop, part, arguments):
    """List the order words in a bin of each row, int64 [F, 1 + count], zeros before."""
    stored, top, wanted, out = arguments
    num_ids, room, bins = stored.logits.shape[1], out.shape[1], np.empty(BLOCK, I32)
    for row in stored.rows[start:stop]:
        logits, number = stored.logits[row], I64(0)
        per_logit = bins_per_logit(stored.temperature[row])
        for base in range(0, num_ids, BLOCK):
            part = logits[base : base + BLOCK]
            bins_of_block(part, top[row], per_logit, bins)
            for j in range(len(part)):
                if bins[j] == wanted[row]:
                    number += 1
                    if number < room:
                        out[row, number] = pack(part[j], stored.first_id + base + j)
        out[row, 0] = number


@jit(entry=True)
def reached_at(start, stop, parts, threads, arguments):
    """Do `reached_at_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(reached_at_rows, start, stop, parts, threads, arguments)


@jit(allocates=True)
def reached_at_rows(start, stop, part, arguments):
    """Find the first of descending words, int64 [F, n], at which a sum reaches its limit."""
    words, temperature, top, reached, limit, weighs, out = arguments
    count = words.shape[1]
    logits, power, mass = np.empty(count, F32), np.empty(count, F32), np.empty(count, I64)
    mass[:] = 1
    for row in range(start, stop):
        for j in range(count):
            logits[j] = value_of(words[row, j])
        if weighs:
            weigh_block(logits, mass_row(top[row], temperature[row]), power, mass)
        upto, place = reached[row], -1
        while place < count - 1 and (place < 0 or upto < limit[row]):
            place += 1
            upto += mass[place] if words[row, place] > 0 else I64(0)
        out[row] = words[row, place]


@jit(entry=True)
def listed_sets(start, stop, parts, threads, arguments):
    """Do `listed_sets_of_rows` for each part of the rows; see `backends.numba_.kernels.threads`."""
    share(listed_sets_of_rows, start, stop, parts, threads, arguments)


@jit()
def listed_sets_of_rows(start, stop, part, arguments):
    """List the ids and log masses of kept sets, int64 and float64 [total].

    Args:
        words: int64 [F, n], descending, then 0.
        log_totals: float64 [F], ln(Σ q / 2^40).
        offsets: int64 [F + 1], where the sets begin.
    """
    words, temperature, top, log_totals, offsets, ids, log_masses = arguments
    for row in range(start, stop):
        largest, heat, first = F64(top[row]), F64(temperature[row]), offsets[row]
        for j in range(words.shape[1]):
            if words[row, j] == 0:
                break
            logit = F64(value_of(words[row, j]))
            below = F64(0) if logit == largest else (logit - largest) / heat
            ids[first + j] = I64(TOKEN_MASK) - (words[row, j] & I64(TOKEN_MASK))
            log_masses[first + j] = below - log_totals[row]
