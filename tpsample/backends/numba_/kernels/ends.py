"""Bounds of sums over stored upper ends of logits. Twin: `ShardLogits.before`, which is exact."""

from __future__ import annotations

import math

import numpy as np

from tpsample.backends.numba_.kernels.best_scores import mark_of
from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, SUMS, jit
from tpsample.backends.numba_.kernels.head import up
from tpsample.backends.numba_.kernels.masses import COEFFICIENTS, DEGREE, ROUNDER, ROUNDER_BITS
from tpsample.backends.numba_.kernels.numbers import value_of
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.backends.screening.bound import TINY
from tpsample.core.masses import TOP_MASS
from tpsample.core.row_noise import LOG2_E
from tpsample.core.word import LOWEST_DRAWABLE

IDS_AT_ONCE = 512
"""As many masses as are summed in fp32, whose roundings stay below 2^-15 of the sum."""


@jit()
def weigh_ends(ends, top, scale, mass):
    """Find e^((end - top) / T) of upper ends, fp32, within 2^-16 of it; at least 2^-64."""
    for j in range(len(ends)):
        exponent = (ends[j] - top) * scale
        exponent = exponent if exponent > F32(-64) else F32(-64)
        shifted = exponent + ROUNDER
        fraction, power = exponent - (shifted - ROUNDER), COEFFICIENTS[DEGREE]
        for i in range(DEGREE - 1, -1, -1):
            power = power * fraction + COEFFICIENTS[i]
        bits = I32(bits_as(F32(shifted), I32) - ROUNDER_BITS + I32(127))
        mass[j] = power * bits_as(I32(bits << I32(23)), F32)


@jit(fastmath=SUMS)
def reaching(ends, mass, edge):
    """Return the mass and the number of the upper ends that are >= an edge."""
    total, number = F32(0), I32(0)
    for j in range(len(ends)):
        total += mass[j] if ends[j] >= edge else F32(0)
        number += ends[j] >= edge
    return total, number


@jit()
def bound_row(ends, error_bound, top, temperature, marks, memory, sums):
    """Bound the masses and the numbers of the tokens of a row whose logits reach marks.

        Σ of ends >= mark + error_bound   <=   Σ of logits > mark   <=   Σ of ends >= mark

    An end has the mass of its logit at least, and e^(error_bound / T) times that at most. So the
    least sum is one of ends over e^(error_bound / T). 2^-14 is more than what fp32 changes of a
    sum, and two units per id are more than the roundings of the masses themselves.

    Args:
        ends: fp32 [V_local], upper ends of logits.
        error_bound: fp32; see `tpsample.request.step.Found`.
        top: fp32, the largest logit of all ranks.
        marks: fp32 [C], logits; inf is not asked. The upper bounds alone have logits that equal a
            mark.
        memory: fp32 [IDS_AT_ONCE] and [2 C], float64 [2 C] and int64 [2 C].
        sums: int64 [4, C], zeros: the least masses, the most, the least numbers, the most; or
            [2, C], without the numbers.
    """
    num_ids, num_marks = len(ends), len(marks)
    mass, edges, masses, numbers = memory
    trivial, spread = num_ids * I64(TOP_MASS), F64(error_bound) / F64(temperature)
    counts = len(sums) > 2
    sums[1] = trivial  # which always holds
    if counts:
        sums[3] = num_ids
    if not spread <= 1.0 or not abs(top) < F32(np.inf):
        return
    for c in range(num_marks):
        edges[c] = up(marks[c] + error_bound) + F32(TINY)
        edges[num_marks + c] = marks[c]
    masses[:], numbers[:] = 0.0, 0
    for base in range(0, num_ids, IDS_AT_ONCE):
        part = ends[base : base + IDS_AT_ONCE]
        weigh_ends(part, top, F32(LOG2_E / F64(temperature)), mass)
        for c in range(2 * num_marks):
            if edges[c] == F32(np.inf):
                continue
            of_block, number = reaching(part, mass, edges[c])
            masses[c] += F64(of_block)
            numbers[c] += I64(number)
    low, high = math.exp(-spread) * (1.0 - 2.0**-14), 1.0 + 2.0**-14
    for c in range(num_marks):
        sums[0, c] = larger(I64(masses[c] * low * TOP_MASS) - 2 * num_ids, 0)
        most = I64(masses[num_marks + c] * high * TOP_MASS) + 2 * num_ids
        sums[1, c] = smaller(most, trivial)
        if counts:
            sums[2, c], sums[3, c] = numbers[c], numbers[num_marks + c]


@jit(in_parts=True, allocates=True)
def bound_best(start, stop, part, arguments):
    """Bound what stands before each of the best scores, and the totals.

    Args:
        error_bound, top: fp32 [F]; top: the largest logits of all ranks.
        best: int64 [F, 1 + 2 C], those of all ranks, `count` for each sample.
        least_of_total: int64 [F]; see `tpsample.request.filters.Thresholds`.
        sums: int64 [F, 2 or 4, C + 1], those of `bound_row`. A best score that decides nothing is
            not asked; the last mark is that of the total.
    """
    stored, error_bound, top, best, least_of_total, count, sums = arguments
    num_scores = sums.shape[2] - 1
    marks, edges = np.empty(num_scores + 1, F32), np.empty(2 * num_scores + 2, F32)
    masses, numbers = np.empty(len(edges), F64), np.empty(len(edges), I64)
    memory = np.empty(IDS_AT_ONCE, F32), edges, masses, numbers
    for row in stored.rows[start:stop]:
        orders, least = best[row, 1 + num_scores :], least_of_total[row]
        for c in range(num_scores):
            mark = mark_of(orders, c - c % count, c)
            marks[c] = value_of(mark) if mark else F32(np.inf)
        marks[num_scores] = value_of(least) if least > LOWEST_DRAWABLE else F32(-np.inf)
        of_row = error_bound[row], top[row], stored.temperature[row]
        bound_row(stored.logits[row], *of_row, marks, memory, sums[row])
