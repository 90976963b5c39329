"""Single numbers: weights as fp32, candidate words, and sums that are rounded once to fp32."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from tpsample.core import word
from tpsample.native.compiling import SUMS, jit

F32, F64, I16, I32, I64 = np.float32, np.float64, np.int16, np.int32, np.int64
U16, U32, U64 = np.uint16, np.uint32, np.uint64

TOKEN_BITS, TOKEN_MASK = word.TOKEN_BITS, word.TOKEN_MASK
KEY_NAN, KEY_MINUS_INF = word.KEY_NAN, word.KEY_MINUS_INF
UNIT_64 = 2.0**-53
LIMBS = 320
"""Most partial sums of an exact sum. Products span bits -298 to 256, sums of 2^20 of them 20 more,
and two neighbouring partial sums are at least two bits apart."""


def as_fp32(number):  # type: ignore[no-untyped-def]
    """Return a weight as fp32, exactly.

    Its type says how its bits are read: uint16 is bf16, int16 is fp16, float32 is itself.
    """
    raise NotImplementedError


@overload(as_fp32)
def _as_fp32(number):  # type: ignore[no-untyped-def]
    if number == types.uint16:
        return lambda number: U32(U32(number) << U32(16)).view(F32)
    if number == types.int16:

        def of_fp16(number):  # type: ignore[no-untyped-def]
            bits = U32(U16(number))
            # 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included.
            size = U32((bits & U32(0x7FFF)) << U32(13)).view(F32) * F32(2.0**112)
            special = U32(U32(0x7F800000) | U32((bits & U32(0x3FF)) << U32(13)))
            is_special = (bits & U32(0x7C00)) == U32(0x7C00)
            unsigned = special if is_special else F32(size).view(U32)
            return U32(unsigned | U32((bits & U32(0x8000)) << U32(16))).view(F32)

        return of_fp16
    return lambda number: number


@jit()
def key_of(value):  # type: ignore[no-untyped-def]
    """Map an fp32 number to 0 … 2^32 − 1, keeping the order; see `tpsample.core.word`."""
    if value != value:
        return I64(KEY_NAN)
    bits = I64(F32(value + F32(0.0)).view(U32))
    return bits ^ I64(0xFFFFFFFF) if bits >> I64(31) else bits ^ I64(0x80000000)


@jit()
def pack(value, token_id):  # type: ignore[no-untyped-def]
    """Return the word of an fp32 score or logit and a global token id."""
    return (key_of(value) << I64(TOKEN_BITS)) | (I64(TOKEN_MASK) - I64(token_id))


@jit()
def value_of(packed):  # type: ignore[no-untyped-def]
    """Return the fp32 number of a word; that of 0 is below every number."""
    key = (packed >> I64(TOKEN_BITS)) & I64(0xFFFFFFFF)
    if key <= I64(KEY_MINUS_INF):
        return F32(-np.inf)
    bits = key ^ I64(0x80000000) if key >> I64(31) else key ^ I64(0xFFFFFFFF)
    return U32(bits).view(F32)


@jit()
def is_nan_word(packed):  # type: ignore[no-untyped-def]
    """Return whether a word is that of a NaN."""
    return ((packed >> I64(TOKEN_BITS)) & I64(0xFFFFFFFF)) == I64(KEY_NAN)


@jit(fastmath=SUMS)
def dot_64(weight, first, hidden):  # type: ignore[no-untyped-def]
    """Return Σ w h and Σ |w h| in float64; each product is exact."""
    total, magnitude = F64(0), F64(0)
    weights = weight[first : first + len(hidden)]
    for d in range(len(hidden)):
        product = F64(as_fp32(weights[d])) * F64(hidden[d])
        total += product
        magnitude += abs(product)
    return total, magnitude


@jit()
def rounded(total, error):  # type: ignore[no-untyped-def]
    """Return (fp32, True) if every number within `error` of `total` rounds to it; else (_, False).

    An infinite sum, or one that is not a number, is decided.
    """
    if not math.isfinite(total):
        return F32(total), True
    nearest = F32(total)
    return nearest, F32(total - error) == F32(total + error)


@jit()
def sums_are_exact(weight, first, hidden, magnitude):  # type: ignore[no-untyped-def]
    """Return whether float64 sums of the products are exact, in any order.

    They are if all products are multiples of 2^q and no sum exceeds 2^(q + 51). Products of bf16
    numbers often are, and then often end on the midpoint of two fp32 numbers.

    Args:
        magnitude: at least Σ |w h|; q = e − 51 for the least 2^e that is not below it.
    """
    if not (0.0 < magnitude < 2.0**500):
        return False
    top = 1.5 * 2.0 ** (math.ceil(math.log2(magnitude * 1.01)) + 1)
    off = False
    for d in range(len(hidden)):
        product = F64(as_fp32(weight[first + d])) * F64(hidden[d])
        off |= (product + top) - top != product
    return not off


@jit(entry=True)
def exact_dot(weight, first, hidden):  # type: ignore[no-untyped-def]
    """Return the exact Σ w h, rounded once to fp32; see `tpsample.core.exact_sum`."""
    total, magnitude = dot_64(weight, first, hidden)
    nearest, decided = rounded(total, F64(1.01 * UNIT_64) * len(hidden) * magnitude)
    if decided or sums_are_exact(weight, first, hidden, magnitude):
        return nearest
    # Shewchuk's expansion: partial sums that do not overlap, the largest last.
    partials, count = np.empty(LIMBS, F64), 0
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
    return to_fp32(partials, count)


@jit()
def to_fp32(partials, count):  # type: ignore[no-untyped-def]
    """Round a sum of partial sums that do not overlap, the largest last, once to fp32.

    float64 is rounded to odd: of the two neighbours of the exact sum it is the odd one, which lies
    on the same side of every fp32 midpoint.
    """
    high, low = F64(0), F64(0)
    i = count - 1
    while i >= 0:
        total = high + partials[i]
        low = partials[i] - (total - high)
        high = total
        i -= 1
        if low != 0.0:
            break
    bits = I64(F64(high).view(I64))
    if low != 0.0 and bits & I64(1) == 0:
        away = (low > 0.0) == (high > 0.0)
        bits += I64(1) if away else I64(-1)
    return F32(I64(bits).view(F64))
