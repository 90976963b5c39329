"""Integer masses of a block of a row's logits. Twin: `tpsample.core.masses`, with the formulas.

The launches set `enable_fp_fusion=False`, because the twin rounds every product. Where a product is
exact, `fma` says so: with one instruction it finds the same bits.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.noise import INTERPRET, fma, safe_temperature
from tpsample.core import masses as twin
from tpsample.core.masses import MassRow

LN2_HIGH = tl.constexpr(twin.LN2_HIGH)
LN2_LOW = tl.constexpr(twin.LN2_LOW)
LOG2_E_32 = tl.constexpr(twin.LOG2_E)
POLYNOMIAL = tl.constexpr(twin.POLYNOMIAL)
DEGREE = tl.constexpr(len(twin.POLYNOMIAL) - 1)
ROUNDER = tl.constexpr(twin.ROUNDER)
ROUNDER_BITS = tl.constexpr(twin.ROUNDER_BITS)
NEAR, FLOOR, SHORT = map(tl.constexpr, (twin.NEAR, twin.FLOOR, twin.SHORT))
HALF = tl.constexpr(2.0**20)
TWO_HALVES = tl.constexpr((twin.ROUNDER_BITS << 20) + twin.ROUNDER_BITS)


@triton.jit
def exact_fma(a, b, c):
    """a · b + c in fp32, where a · b is an fp32 number."""
    if INTERPRET:
        return a * b + c
    else:
        return tl.fma(a, b, c)


@triton.jit
def short(x):
    """The first 17 significant bits of fp32 numbers."""
    return (x.to(tl.int32, bitcast=True) & SHORT).to(tl.float32, bitcast=True)


@triton.jit
def mass_row(top, temperature):
    """The numbers of a row that its masses need, of a temperature as its request has it."""
    temperature = safe_temperature(temperature)
    scale = tl.div_rn(tl.full((), LOG2_E_32, tl.float32), temperature)
    unit = short(temperature * LN2_HIGH)
    left = fma(temperature, LN2_HIGH, -unit)
    rest = short(left + temperature * LN2_LOW)
    near = tl.abs(top * scale) < NEAR
    base, high = tl.where(near, 0.0, top), tl.where(near, top, 0.0)
    turns = high * scale
    n = (turns + ROUNDER) - ROUNDER
    low, start = high - unit * FLOOR, high - n * unit
    return MassRow(base, high, low, scale, unit, rest, start, turns - n, ROUNDER - n)


@triton.jit
def between(x, low, high):
    """fp32 numbers within bounds; `high` in place of a NaN."""
    if INTERPRET:
        x = tl.where(x < high, x, high)
        return tl.where(x > low, x, low)
    else:
        return tl.maximum(tl.minimum(x, high), low)


@triton.jit
def powers(logits, row):
    """2^E, ROUNDER + w and f, fp32."""
    x = between(logits - row.base, row.low, row.high)
    shifted = (x * row.scale - row.turn) + row.rounder
    whole = shifted - ROUNDER
    x = exact_fma(row.rounder - shifted, row.unit, x) - row.start
    f = exact_fma(-whole, row.rest, x) * row.scale
    power = tl.full(f.shape, POLYNOMIAL[DEGREE], tl.float32)
    for i in tl.static_range(DEGREE - 1, -1, -1):
        power = power * f + POLYNOMIAL[i]
    # `shifted` ends in the bits of w, which go to the exponent.
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True), shifted, f


@triton.jit
def rounded(power):
    """rint(2^40 · power), int64, |power| <= 1, in two halves of 20 bits.

    To convert to 64 bits is as slow as float64 on many GPUs.
    """
    shifted = exact_fma(power, HALF, ROUNDER)
    left = exact_fma(power, HALF, ROUNDER - shifted)
    low = exact_fma(left, HALF, ROUNDER)
    high = shifted.to(tl.uint32, bitcast=True).to(tl.int64)
    return (high << 20) + low.to(tl.uint32, bitcast=True).to(tl.int64) - TWO_HALVES


@triton.jit
def masses(logits, row):
    """q, int64, of logits of a `MassRow`."""
    power, _, _ = powers(logits, row)
    return rounded(power)


@triton.jit
def masses_and_moments(logits, row):
    """q and m, int64, of logits of a `MassRow`."""
    power, shifted, f = powers(logits, row)
    mass, whole = rounded(power), shifted.to(tl.int32, bitcast=True) - ROUNDER_BITS
    return mass, -(mass * whole) - rounded(power * f)
