"""Bounds of sums over stored upper ends of logits. Twin: `ShardLogits.before`, which is exact."""

from __future__ import annotations

import math

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, SUMS, jit
from tpsample.backends.numba_.kernels.head import up
from tpsample.backends.numba_.kernels.masses import COEFFICIENTS, DEGREE, ROUNDER, ROUNDER_BITS
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.backends.screening.bound import TINY
from tpsample.core.masses import TOP_MASS
from tpsample.core.row_noise import LOG2_E

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


@jit(in_parts=True, allocates=True)
def bound_sums(start, stop, part, arguments):
    """Bound the masses and the numbers of the tokens whose logits reach marks.

        Σ of ends >= mark + error_bound   <=   Σ of logits > mark   <=   Σ of ends >= mark

    An end has the mass of its logit at least, and e^(error_bound / T) times that at most. So the
    least sum is one of ends over e^(error_bound / T). 2^-14 is more than what fp32 changes of a
    sum, and two units per id are more than the roundings of the masses themselves.

    Args:
        error_bound: fp32 [F]; see `tpsample.backends.torch_.passes.Rough`.
        top: fp32 [F], largest logits of all ranks.
        marks: fp32 [F, C], logits; inf is not asked. The upper bounds alone have logits that equal
            a mark.
        sums: int64 [F, 4, C], zeros: the least masses, the most, the least numbers, the most.
    """
    stored, error_bound, top, marks, sums = arguments
    num_ids, num_marks = stored.logits.shape[1], marks.shape[1]
    mass, edges = np.empty(IDS_AT_ONCE, F32), np.empty(2 * num_marks, F32)
    masses, numbers = np.empty(2 * num_marks, F64), np.empty(2 * num_marks, I64)
    for row in stored.rows[start:stop]:
        of_row, temperature, trivial = (
            sums[row],
            F64(stored.temperature[row]),
            num_ids * I64(TOP_MASS),
        )
        of_row[1], of_row[3] = trivial, num_ids  # which always hold
        spread = F64(error_bound[row]) / temperature
        if not spread <= 1.0 or not abs(top[row]) < F32(np.inf):
            continue
        for c in range(num_marks):
            edges[c] = up(marks[row, c] + error_bound[row]) + F32(TINY)
            edges[num_marks + c] = marks[row, c]
        masses[:], numbers[:] = 0.0, 0
        for base in range(0, num_ids, IDS_AT_ONCE):
            ends = stored.logits[row, base : base + IDS_AT_ONCE]
            weigh_ends(ends, top[row], F32(LOG2_E / temperature), mass)
            for c in range(2 * num_marks):
                if edges[c] == F32(np.inf):
                    continue
                of_block, number = reaching(ends, mass, edges[c])
                masses[c] += F64(of_block)
                numbers[c] += I64(number)
        low, high = math.exp(-spread) * (1.0 - 2.0**-14), 1.0 + 2.0**-14
        for c in range(num_marks):
            of_row[0, c] = larger(I64(masses[c] * low * TOP_MASS) - 2 * num_ids, 0)
            most = I64(masses[num_marks + c] * high * TOP_MASS) + 2 * num_ids
            of_row[1, c] = smaller(most, trivial)
            of_row[2, c], of_row[3, c] = numbers[c], numbers[num_marks + c]
