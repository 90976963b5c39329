"""Integer masses of a block of a row's logits. Twin: `tpsample.core.masses`, with the formulas.

Launches set `enable_fp_fusion=False`, because the twin rounds every product. Where a product is
exact, `fma` says so: with one instruction it finds the same bits.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.backends.triton_.kernels.noise import INTERPRET, fma, safe_temperature
from tpsample.backends.triton_.kernels.order import WARP, by_thread
from tpsample.core import masses as twin
from tpsample.core.masses import MassRow

ABOUT_ERROR, TOP_MASS = Constant(twin.ABOUT_ERROR), Constant(float(twin.TOP_MASS))
LN2_HIGH = Constant(twin.LN2_HIGH)
LN2_LOW = Constant(twin.LN2_LOW)
LOG2_E_32 = Constant(twin.LOG2_E)
POLYNOMIAL = Constant(twin.POLYNOMIAL)
DEGREE = Constant(len(twin.POLYNOMIAL) - 1)
ROUNDER = Constant(twin.ROUNDER)
ROUNDER_BITS = Constant(twin.ROUNDER_BITS)
NEAR, FLOOR, SHORT = map(Constant, (twin.NEAR, twin.FLOOR, twin.SHORT))
HALF = Constant(2.0**20)
EIGHT = Constant((8 * twin.ROUNDER_BITS + 2**31) % 2**32 - 2**31)
EIGHT_SQUARES = Constant((8 * twin.ROUNDER_BITS**2 + 2**63) % 2**64 - 2**63)
"""The numbers that eight logits of a thread add to its sums too much, as sums wrap around."""
TWO_HALVES = Constant((twin.ROUNDER_BITS << 20) + twin.ROUNDER_BITS)


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
def powers(logits, row, kept):
    """2^E, ROUNDER + w and f, fp32; of a logit that is not kept those of one without a mass."""
    x = between(logits - row.base, row.low, row.high)
    if kept is not None:
        x = tl.where(kept, x, row.low)
    shifted = (x * row.scale - row.turn) + row.rounder
    x = exact_fma(row.rounder - shifted, row.unit, x) - row.start
    f = exact_fma(ROUNDER - shifted, row.rest, x) * row.scale
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
def halves(power):
    """The halves of `rounded` as int32, each with ROUNDER_BITS added."""
    shifted = exact_fma(power, HALF, ROUNDER)
    left = exact_fma(power, HALF, ROUNDER - shifted)
    low = exact_fma(left, HALF, ROUNDER)
    return shifted.to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True)


@triton.jit
def sums_of(bits):
    """Σ `by_thread` of int32 [BLOCK] that have ROUNDER_BITS added, without these.

    On a GPU a sum of 32 bits may exceed them on the way, and three addends take one instruction.
    """
    if INTERPRET:
        return by_thread(bits - ROUNDER_BITS)
    else:
        return by_thread(bits) - EIGHT


@triton.jit
def sums_of_products(a, b):
    """Σ a · b `by_thread`, int64, of int32 [BLOCK] that have ROUNDER_BITS added, without these.

    To take them off each factor would cost two instructions per logit, so that they are taken off
    the sum, modulo 2^64.
    """
    if INTERPRET:
        return by_thread((a - ROUNDER_BITS).to(tl.int64) * (b - ROUNDER_BITS))
    else:
        products = by_thread(a.to(tl.int64) * b.to(tl.int64)) - EIGHT_SQUARES
        return products - ROUNDER_BITS * (sums_of(a).to(tl.int64) + sums_of(b).to(tl.int64))


@triton.jit
def masses(logits, row):
    """q, int64, of logits of a `MassRow`."""
    power, _, _ = powers(logits, row, None)
    return rounded(power)


@triton.jit
def halves_of_masses(logits, row):
    """The halves of q of logits of a `MassRow`, int32 without ROUNDER_BITS."""
    power, _, _ = powers(logits, row, None)
    high, low = halves(power)
    return high - ROUNDER_BITS, low - ROUNDER_BITS


@triton.jit
def sum_of_kept(high, low, kept):
    """Σ q of the kept of up to 2048 tokens, int64, from `halves_of_masses`."""
    first = tl.sum(tl.where(kept, high, 0), axis=0).to(tl.uint32, bitcast=True)
    return (first.to(tl.int64) << 20) + tl.sum(tl.where(kept, low, 0), axis=0).to(tl.int64)


@triton.jit
def masses_of_threads(high, low, kept):
    """Σ q `by_thread`, int64, of the kept of some tokens, from `halves_of_masses`."""
    sums = by_thread(tl.where(kept, high, 0)).to(tl.int64) << 20
    return sums + by_thread(tl.where(kept, low, 0)).to(tl.int64)


@triton.jit
def masses_alone(logits, row, kept):
    """Σ q `by_thread`, int64, of the kept logits of a `MassRow`."""
    power, _, _ = powers(logits, row, kept)
    high, low = halves(power)
    return (sums_of(high).to(tl.int64) << 20) + sums_of(low).to(tl.int64)


@triton.jit
def add_about(address, sums, UNIT: tl.constexpr):
    """Add fp32 sums `by_thread`, times UNIT, to an int64 in memory."""
    of_warps = tl.sum(sums.reshape((sums.shape[0] // WARP, WARP)), axis=1)
    whole = (of_warps * UNIT).to(tl.int64)
    tl.atomic_add(address + tl.zeros(of_warps.shape, tl.int32), whole, sem="relaxed")


@triton.jit
def error_of(mass, total):
    """How far a mass of `add_about` may be off, int64. Nothing is off before the first token."""
    error = tl.ceil(total.to(tl.float64) * ABOUT_ERROR).to(tl.int64)
    return tl.where(mass > 0, error, 0)


@triton.jit
def masses_and_moments(logits, row, kept):
    """Σ q and Σ m `by_thread`, int64, of the kept logits of a `MassRow`."""
    power, shifted, f = powers(logits, row, kept)
    high, low = halves(power)
    whole = shifted.to(tl.int32, bitcast=True)
    moment = (sums_of_products(high, whole) << 20) + sums_of_products(low, whole)
    high_rest, low_rest = halves(power * f)
    moment += (sums_of(high_rest).to(tl.int64) << 20) + sums_of(low_rest).to(tl.int64)
    return (sums_of(high).to(tl.int64) << 20) + sums_of(low).to(tl.int64), -moment
