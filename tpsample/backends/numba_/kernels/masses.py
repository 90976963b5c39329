"""Integer masses of a row's logits. Twin: `tpsample.core.masses`, with the formulas."""

from __future__ import annotations

import math

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, jit
from tpsample.backends.numba_.kernels.primitives import bits_as
from tpsample.core import masses as twin
from tpsample.core.masses import MassRow

COEFFICIENTS = np.array(twin.POLYNOMIAL, F32)
DEGREE = len(COEFFICIENTS) - 1
ROUNDER, HALF = F32(twin.ROUNDER), F32(2.0**20)
ROUNDER_BITS = I32(twin.ROUNDER_BITS)


@jit()
def short(x):
    """Return the first 17 significant bits of an fp32 number."""
    return bits_as(I32(bits_as(F32(x), I32) & I32(twin.SHORT)), F32)


@jit()
def mass_row(top, temperature):
    """Return what the masses of a row need."""
    scale = F32(F32(twin.LOG2_E) / temperature)
    unit = short(temperature * F32(twin.LN2_HIGH))
    left = F32(F64(temperature) * twin.LN2_HIGH - F64(unit))
    rest = short(left + temperature * F32(twin.LN2_LOW))
    near = abs(top * scale) < F32(twin.NEAR)
    base, high = (F32(0), top) if near else (top, F32(0))
    turns = high * scale
    n = (turns + ROUNDER) - ROUNDER
    low, start = high - unit * F32(twin.FLOOR), high - n * unit
    return MassRow(base, high, low, scale, unit, rest, start, turns - n, ROUNDER - n)


@jit()
def mass_limit(total, share):
    """Return the limit of the mass before kept tokens. Twin: `tpsample.core.order.mass_limit`."""
    return I64(math.ceil(F64(total) * share)) if share < 1.0 else I64(2**62)


@jit(inline=True)
def power_of(logit, row):
    """Return 2^E, ROUNDER + w and f of a logit, fp32."""
    x = logit - row.base
    x = x if x < row.high else row.high
    x = x if x > row.low else row.low
    shifted = (x * row.scale - row.turn) + row.rounder
    x = (x - (shifted - row.rounder) * row.unit) - row.start
    fraction = (x - (shifted - ROUNDER) * row.rest) * row.scale
    power = COEFFICIENTS[DEGREE]
    for i in range(DEGREE - 1, -1, -1):
        power = power * fraction + COEFFICIENTS[i]
    # `shifted` ends in the bits of w, which go to the exponent.
    bits = I32(bits_as(F32(power), I32) + I32(bits_as(F32(shifted), I32) << I32(23)))
    return bits_as(bits, F32), shifted, fraction


@jit(inline=True)
def rounded(power):
    """Return rint(2^40 · power), int64, |power| <= 1, in two halves of 20 bits."""
    shifted = power * HALF + ROUNDER
    low = (power * HALF - (shifted - ROUNDER)) * HALF + ROUNDER
    high = I64(I32(bits_as(F32(shifted), I32) - ROUNDER_BITS)) << I64(20)
    return high + I64(I32(bits_as(F32(low), I32) - ROUNDER_BITS))


@jit()
def weigh_block(logits, row, power, mass):
    """Find 2^E and q of some logits, fp32 and int64.

    In one loop, vectors would have as many numbers as there are of 64 bits.
    """
    for j in range(len(logits)):
        power[j], _, _ = power_of(logits[j], row)
    for j in range(len(logits)):
        mass[j] = rounded(power[j])


@jit()
def weigh_moments(logits, row, parts, whole, mass, moment):
    """Find q and m of some logits, int64, by way of fp32 [2, n] and int32 [n]."""
    power, turned = parts[0], parts[1]
    for j in range(len(logits)):
        power[j], shifted, fraction = power_of(logits[j], row)
        whole[j], turned[j] = bits_as(F32(shifted), I32) - ROUNDER_BITS, power[j] * fraction
    for j in range(len(logits)):
        mass[j] = rounded(power[j])
        moment[j] = -(mass[j] * I64(whole[j])) - rounded(turned[j])
