"""Single numbers: weights as fp32, powers of 2, words, and sums that are rounded once to fp32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tpsample.backends.numba_.kernels.compiling import (
    F32,
    F64,
    I32,
    I64,
    SUMS,
    U16,
    U32,
    U64,
    jit,
)
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.core.score import POWER_OF_2
from tpsample.core.word import KEY_MINUS_INF, TOKEN_BITS, TOKEN_MASK

UNIT_64 = 2.0**-53
COEFFICIENTS = np.array(POWER_OF_2)
INTEGER = 1.5 * 2.0**52
"""Adding it rounds a float64 number below 2^51 to an integer, ties to even, in the lowest bits."""
LIMBS = 320
"""Most partial sums of an exact sum. Products span bits -298 to 256, sums of 2^20 of them 20 more,
and two neighbouring partial sums are at least two bits apart."""


def of_fp16(number):
    """Return the fp32 number equal to the fp16 number with the bits of int16."""
    bits = U32(U16(number))
    # 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included.
    size = bits_as(U32((bits & U32(0x7FFF)) << U32(13)), F32) * F32(2.0**112)
    special = U32(U32(0x7F800000) | U32((bits & U32(0x3FF)) << U32(13)))
    is_special = (bits & U32(0x7C00)) == U32(0x7C00)
    unsigned = special if is_special else bits_as(F32(size), U32)
    return bits_as(U32(unsigned | U32((bits & U32(0x8000)) << U32(16))), F32)


@intrinsic
def as_fp32(typing, number):  # type: ignore[no-untyped-def]
    """Return a weight as fp32, exactly: fp32, the bits of fp16 as int16, or of bf16 as uint16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if number == types.int16:
            return context.compile_internal(builder, of_fp16, signature, values)
        if number == types.float32:
            return values[0]
        upper_half = builder.shl(builder.zext(values[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(upper_half, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def scaled(typing, number):  # type: ignore[no-untyped-def]
    """Return a finite weight over 2^(1023 − b) as float64, exactly; b is the bias of its exponent.

    A shift of its bits takes less time than a conversion. An infinity or a NaN becomes finite.
    """
    shift = 52 - {types.uint16: 7, types.int16: 10, types.float32: 23}[number]
    kept = -(2**63) | 2 ** (number.bitwidth - 1 + shift) - 1

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        wide, bits = ir.IntType(64), builder.bitcast(values[0], ir.IntType(number.bitwidth))
        moved = builder.and_(builder.shl(builder.sext(bits, wide), wide(shift)), wide(kept))
        return builder.bitcast(moved, ir.DoubleType())

    return types.float64(number), generate


@intrinsic
def size_bits(typing, number, step):  # type: ignore[no-untyped-def]
    """Return the bits of a weight's absolute value, plus a step, as an unsigned integer."""
    integer = types.uint32 if number == types.float32 else types.uint16

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = builder.bitcast(values[0], ir.IntType(number.bitwidth))
        size = builder.and_(bits, bits.type(2 ** (number.bitwidth - 1) - 1))
        return builder.add(size, builder.trunc(values[1], bits.type))

    return integer(number, types.intp), generate


@jit()
def power_of_2(exponent):
    """Return 2^x of float64 x, |x| <= 1000; twin: `tpsample.core.score.power_of_2`."""
    shifted = exponent + INTEGER
    fraction = exponent - (shifted - INTEGER)
    power = COEFFICIENTS[13]
    for i in range(12, -1, -1):
        power = power * fraction + COEFFICIENTS[i]
    return power * bits_as(I64((bits_as(F64(shifted), I64) + I64(1023)) << I64(52)), F64)


@jit(inline=True)
def two_to(exponent):
    """Return 2^n of an integer n, |n| <= 1000."""
    return bits_as(I64((I64(exponent) + I64(1023)) << I64(52)), F64)


@jit()
def ordered(value):
    """Map fp32 to int32, keeping the order; a NaN is the largest, -0.0 is 0.

    A branch for the NaN would keep loops from being vector code.
    """
    bits = bits_as(F32(value + F32(0)), I32)
    is_nan = I32(I32(0x7F800000) - (bits & I32(0x7FFFFFFF))) >> I32(31)  # 0, or −1: all bits
    order = bits ^ ((bits >> I32(31)) & I32(0x7FFFFFFF))
    return I32((order | is_nan) & ~(is_nan & I32(-(2**31))))


@jit()
def of_ordered(order):
    """Return the fp32 number of an `ordered` one."""
    return bits_as(I32(order ^ ((order >> I32(31)) & I32(0x7FFFFFFF))), F32)


@jit()
def pack(value, token_id):
    """Return the word of an fp32 score or logit and a global token id; see `tpsample.core.word`."""
    key = I64(ordered(value)) + I64(2**31)
    return (key << I64(TOKEN_BITS)) | (I64(TOKEN_MASK) - I64(token_id))


@jit()
def key_of(packed):
    """Return the key of a word, int64 0 … 2^32 − 1."""
    return (packed >> I64(TOKEN_BITS)) & I64(0xFFFFFFFF)


@jit()
def value_of(packed):
    """Return the fp32 number of a word; that of 0 is below every number."""
    key = key_of(packed)
    return of_ordered(I32(key - I64(2**31))) if key > I64(KEY_MINUS_INF) else F32(-np.inf)


@jit()
def lanes_reaching(values, threshold, within):
    """Return the lanes of fp32 [64] that are not below a threshold, nor -inf, as bits of uint64.

    Args:
        within: the lanes that count, because those outside of a block have numbers of no id.
    """
    lanes = U64(0)
    for j in range(64):
        lanes |= U64(not (values[j] < threshold or values[j] == F32(-np.inf))) << U64(j)
    return lanes & within


@jit(inline=True)
def lowest_lane(lanes):
    """Return the lowest of some lanes: a power of two as float64 has it in its exponent."""
    return (bits_as(F64(lanes & (~lanes + U64(1))), I64) >> I64(52)) - I64(1023)


@jit()
def number_of(lanes):
    """Return how many lanes there are; sums of two, four and eight bits at a time."""
    lanes -= (lanes >> U64(1)) & U64(0x5555555555555555)
    lanes = (lanes & U64(0x3333333333333333)) + ((lanes >> U64(2)) & U64(0x3333333333333333))
    lanes = (lanes + (lanes >> U64(4))) & U64(0x0F0F0F0F0F0F0F0F)
    return I64((lanes * U64(0x0101010101010101)) >> U64(56))


@jit()
def largest_size(values):
    """Return the largest absolute value of fp32 numbers, -inf left out; a NaN if there is one."""
    most = I32(0)
    for j in range(len(values)):
        bits = bits_as(F32(values[j]), I32) & I32(0x7FFFFFFF)
        most = larger(most, I32(0) if values[j] == F32(-np.inf) else bits)
    return F64(bits_as(I32(most), F32))


@jit()
def least_and_largest(numbers, begin, step, size):
    """Return the least absolute value of some weights but 0, and the largest, as fp32 numbers.

    The least is +inf if there is none, and so is the largest if one is a NaN. Bits are compared,
    because one instruction compares those of 16 numbers of 16 bits.

    Args:
        begin, step: uint64, where the first of four runs begins, and how far the next one is.
        size: of each run.
    """
    second, third, fourth = begin + step, begin + U64(2) * step, begin + U64(3) * step
    kind = numbers.dtype.type
    least, most = size_bits(kind(0), -1), size_bits(kind(0), 0)  # 0 becomes the largest integer
    for d in range(size):
        at = U64(d)
        a, b = numbers[begin + at], numbers[second + at]
        c, e = numbers[third + at], numbers[fourth + at]
        least = smaller(least, smaller(size_bits(a, -1), size_bits(b, -1)))
        least = smaller(least, smaller(size_bits(c, -1), size_bits(e, -1)))
        most = larger(most, larger(size_bits(a, 0), size_bits(b, 0)))
        most = larger(most, larger(size_bits(c, 0), size_bits(e, 0)))
    low = as_fp32(bits_as(size_bits(bits_as(least, kind), 1), kind))
    high = as_fp32(bits_as(most, kind))
    return low if low > F32(0) else F32(np.inf), high if high == high else F32(np.inf)


@jit()
def quantum_of(least, fraction_bits):
    """Return a power of two that divides some fp32 numbers.

    Args:
        least: the least of their absolute values but 0.
        fraction_bits: of their significands, at most.
    """
    exponent = I64(bits_as(F32(least), U32) >> U32(23))
    return two_to(larger(exponent, 1) - 127 - fraction_bits)


@jit(fastmath=SUMS)
def dot_64(weight, first, hidden):
    """Return Σ w h and Σ |w h| in float64; each product is exact."""
    total, magnitude = F64(0), F64(0)
    weights = weight[first : first + len(hidden)]
    for d in range(len(hidden)):
        product = F64(as_fp32(weights[d])) * F64(hidden[d])
        total += product
        magnitude += abs(product)
    return total, magnitude


@jit()
def is_decided(total, error):
    """Return whether every number within `error` of `total` rounds to the same fp32 number.

    An infinite sum, or one that is not a number, is decided.
    """
    return not math.isfinite(total) or F32(total - error) == F32(total + error)


@jit()
def sums_are_exact(weight, first, hidden, magnitude):
    """Return whether float64 sums of the products are exact, in any order.

    They are if all products are multiples of 2^q and no sum exceeds 2^(q + 51). Products of bf16
    numbers often are, and then often end on the midpoint of two fp32 numbers.

    Args:
        magnitude: at least Σ |w h|; q = e − 51 for the least 2^e that is not below it.
    """
    if not (0.0 < magnitude < 2.0**500):
        return False
    top = 1.5 * two_to(math.ceil(math.log2(magnitude * 1.01)) + 1)
    off = False
    for d in range(len(hidden)):
        product = F64(as_fp32(weight[first + d])) * F64(hidden[d])
        off |= (product + top) - top != product
    return not off


@jit(inline=True)
def no_overflow(product):
    """Return an fp32 product; NaN in place of +inf, which no hidden states mean."""
    return F32(np.nan) if product == F32(np.inf) else F32(product)


@jit()
def exact_product(weight, first, hidden):
    """Return the product that a logit is made of; twin: `tpsample.core.score.logits_tile`."""
    return no_overflow(exact_dot(weight, first, hidden))


@jit()
def exact_dot(weight, first, hidden):
    """Return the exact Σ w h, rounded once to fp32; see `tpsample.core.exact_sum`."""
    total, magnitude = dot_64(weight, first, hidden)
    decided = is_decided(total, F64(1.01 * UNIT_64) * len(hidden) * magnitude)
    if decided or sums_are_exact(weight, first, hidden, magnitude):
        return F32(total)
    return expanded_dot(weight, first, hidden)


@jit(allocates=True)
def expanded_dot(weight, first, hidden):
    """Return what `exact_dot` does, by Shewchuk's expansion.

    Its partial sums do not overlap; the largest is the last. Their sum is rounded to odd in float64
    before it is rounded to fp32: of the two neighbours of the exact sum it is the odd one, which
    lies on the same side of every fp32 midpoint.
    """
    partials, count = np.empty(LIMBS, F64), I64(0)
    for d in range(len(hidden)):
        x, kept = F64(as_fp32(weight[first + d])) * F64(hidden[d]), 0
        for i in range(count):
            y = partials[i]
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low != 0.0:
                partials[kept] = low
                kept += 1
            x = high
        partials[kept] = x
        count = kept + 1
    high, low = F64(0), F64(0)
    for i in range(count - 1, -1, -1):
        total = high + partials[i]
        low = partials[i] - (total - high)
        high = total
        if low != 0.0:
            break
    bits = I64(bits_as(F64(high), I64))
    if low != 0.0 and bits & I64(1) == 0:
        bits += I64(1) if (low > 0.0) == (high > 0.0) else I64(-1)
    return F32(bits_as(I64(bits), F64))
