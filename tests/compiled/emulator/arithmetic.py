"""Single instructions on arrays of registers, bit for bit as the PTX ISA defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import vectorize
from numba.extending import intrinsic


@intrinsic
def _fused(context, a, b, c):
    return a(a, b, c), lambda context, builder, signature, given: builder.fma(*given)


@vectorize(["f4(f4, f4, f4)", "f8(f8, f8, f8)"], cache=True)
def fma(a, b, c):
    """Return a · b + c with one rounding."""
    return _fused(a, b, c)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the signed quotient toward zero; that of 0 is all ones."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return np.where(b == 0, -1, (a - np.fmod(a, safe)) // safe)


def flushed(x: np.ndarray) -> np.ndarray:
    """Return subnormal numbers as zeros of their sign, as `.ftz` does."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def shifted_left(a: np.ndarray, amount: np.ndarray, bits: int) -> np.ndarray:
    inside = a << np.minimum(amount, bits - 1).astype(a.dtype)
    return inside if np.all(amount < bits) else np.where(amount < bits, inside, a.dtype.type(0))


def shifted_right(a: np.ndarray, amount: np.ndarray, bits: int) -> np.ndarray:
    """Return an arithmetic shift of signed numbers, a logical one of others."""
    inside = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    if a.dtype.kind == "i" or np.all(amount < bits):
        return inside
    return np.where(amount < bits, inside, a.dtype.type(0))


def minimum(nan: bool, *given: np.ndarray) -> np.ndarray:
    """Return the minimum, where -0 is below +0; NaN wins with `nan`, and loses without."""
    return _canonical(-maximum(nan, *map(np.negative, given)))


def maximum(nan: bool, a: np.ndarray, b: np.ndarray, *more: np.ndarray) -> np.ndarray:
    """Return the maximum, where +0 is above -0; NaN wins with `nan`, and loses without."""
    found = np.maximum(a, b) if nan else np.fmax(a, b)
    zeros = (a == 0) & (b == 0)
    if np.any(zeros):
        both = np.signbit(a) & np.signbit(b)
        found = np.where(zeros, np.where(both, a, np.abs(found)), found)
    return maximum(nan, found, *more) if more else _canonical(found)


def _canonical(x: np.ndarray) -> np.ndarray:
    one = np.uint32(0x7FFFFFFF).view(np.float32) if x.dtype == np.float32 else np.nan
    return np.where(np.isnan(x), one, x)


def extracted(a: np.ndarray, start: Any, length: Any, signed: bool) -> np.ndarray:
    """`bfe`: some bits of a 32-bit number, with their sign or without."""
    start, length = (np.asarray(x).astype(np.int64) & 255 for x in (start, length))
    if not signed:
        mask = (np.int64(1) << np.minimum(length, 32)) - 1
        return (np.asarray(a).astype(np.int64) >> np.minimum(start, 63)) & mask
    end = np.minimum(start + length, 32)
    kept = 64 - np.minimum(length, end - np.minimum(start, end))
    found = (np.asarray(a).astype(np.int64) << (64 - end)) >> np.minimum(kept, 63)
    return np.where(length == 0, 0, found)


def permuted(a: np.ndarray, b: np.ndarray, selector: Any) -> np.ndarray:
    """`prmt`: four of the eight bytes of a and b, each whole or as its sign."""
    eight = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
    selector, found = np.asarray(selector).astype(np.uint64), np.uint64(0)
    for place in range(4):
        code = (selector >> np.uint64(4 * place)) & np.uint64(15)
        byte = (eight >> ((code & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        byte = np.where(code >> np.uint64(3), sign, byte)
        found = found | (byte << np.uint64(8 * place))
    return np.asarray(found).astype(np.uint32)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 number of each bf16's 16 bits."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """Return the 16 bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def rounded(x: np.ndarray, mode: str) -> np.ndarray:
    """Return a whole number as a float."""
    return _ROUNDINGS[mode](x)


def to_integer(x: np.ndarray, mode: str, bits: int, signed: bool) -> np.ndarray:
    """Return integers, the nearest possible one where a number is too large; 0 for NaN."""
    x = _ROUNDINGS[mode](np.asarray(x).astype(np.float64))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    kind = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    # float64 rounds the largest 64-bit number up, to the first that is too large.
    found = np.where((x >= low) & (x < float(high)), x, 0).astype(kind)
    found = np.where(x < low, kind.type(low), found)
    return np.where(x >= float(high), kind.type(high), found)
