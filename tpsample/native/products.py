"""Products of a block of weight rows and some hidden states: fp32 with a bound, or float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.native.compiling import F32, F64, I16, I32, I64, SUMS, U64, jit
from tpsample.native.inputs import BLOCK
from tpsample.native.numbers import UNIT_64, as_fp32, exact_dot, is_decided, largest_size
from tpsample.screening.bound import DEFINITION_ERROR, LARGEST, ROUNDING, TINY, UNIT

COLUMNS = 640
"""Most columns that are multiplied at once: 64 rows and 64 ids of them are 320 KB in fp32, which a
core's second cache holds."""

EXACT_COLUMNS = 512
"""Columns whose 8-bit times 16-bit products fit an int32: 512 · 127 · 32512 < 2^31."""


class Copy(NamedTuple):
    """An 8-bit copy of a weight (`Int8Copy`); no rows without a copy.

    Attributes:
        numbers: int8 [V_local · D], flat.
        scale, norm, residual_norm: fp32 [V_local].
    """

    numbers: np.ndarray = np.empty(0, np.int8)
    scale: np.ndarray = np.empty(0, F32)
    norm: np.ndarray = np.empty(0, F32)
    residual_norm: np.ndarray = np.empty(0, F32)


class Products(NamedTuple):
    """Products of a block, and the memory to make them.

    Attributes:
        values: [R or more, BLOCK], fp32 or float64.
        errors: fp32 [R, BLOCK], how far fp32 values are off at most.
        proved: bool [R], whether they are; values that are not proved are NaN.
        tile: [BLOCK + 1, COLUMNS], converted weights, of the type of the values.
        squares: [BLOCK], of the same type, Σ w² of each id.
    """

    values: np.ndarray
    errors: np.ndarray
    proved: np.ndarray
    tile: np.ndarray
    squares: np.ndarray


@jit()
def products_of(hidden, num_rows):
    """Return the memory of products with some rows, in the type of these hidden states."""
    values, dtype = np.empty((len(hidden), BLOCK), hidden.dtype), hidden.dtype
    tile = np.empty((BLOCK + 1 if len(hidden) > 1 else 0, COLUMNS), dtype)  # one row needs none
    errors, proved = np.empty((num_rows, BLOCK), F32), np.empty(num_rows, np.bool_)
    return Products(values, errors, proved, tile, np.empty(BLOCK, dtype))


@jit(fastmath=SUMS)
def convert(weight, first, size, out):
    """Convert some weights of a row to the type of `out`; return the sum of their squares."""
    part, total = weight[first : first + size], out.dtype.type(0)
    for d in range(size):
        x = out.dtype.type(as_fp32(part[d]))
        out[d] = x
        total += x * x
    return total


@jit(fastmath=SUMS)
def products_of_one(weight, block, hidden, out, squares):
    """Multiply the weights of a block by one row, in any order; squares are Σ w²."""
    one = hidden.dtype.type
    # Unsigned, because a signed index that might be negative keeps the loop from being vector code.
    for i in range(block.count):
        begin = U64((block.local + i) * weight.stride)
        total, square = one(0), one(0)
        for d in range(len(hidden)):
            x = one(as_fp32(weight.numbers[begin + U64(d)]))
            total += x * hidden[d]
            square += x * x
        out[block.lane + i], squares[block.lane + i] = total, square


@jit(fastmath=SUMS)
def products_of_four(h0, h1, h2, h3, tile, count, out):
    """Add the products of four rows and `count` ids to out, [4, ≥ count], two ids at a time.

    Args:
        h0, h1, h2, h3: [size], columns of the hidden states.
        tile: [≥ count + 1, ≥ size], the weights, with a row after the last id.
    """
    size = len(h0)
    zero = h0.dtype.type(0)
    for i in range(0, count, 2):
        x, y = tile[i, :size], tile[i + 1, :size]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for d in range(size):
            a0 += x[d] * h0[d]
            a1 += x[d] * h1[d]
            a2 += x[d] * h2[d]
            a3 += x[d] * h3[d]
            b0 += y[d] * h0[d]
            b1 += y[d] * h1[d]
            b2 += y[d] * h2[d]
            b3 += y[d] * h3[d]
        out[0, i] += a0
        out[1, i] += a1
        out[2, i] += a2
        out[3, i] += a3
        if i + 1 < count:
            out[0, i + 1] += b0
            out[1, i + 1] += b1
            out[2, i + 1] += b2
            out[3, i + 1] += b3


@jit()
def multiply(weight, block, hidden, products):
    """Multiply the weights of a block by all hidden states, in the type of these.

    Values and squares are 0 in the lanes outside of the block.

    Args:
        hidden: [R, D], R a multiple of four, or 1.
    """
    values, squares, tile = products.values, products.squares, products.tile
    values[:], squares[:] = 0, 0
    num_rows, hidden_size = hidden.shape
    if num_rows == 1:
        products_of_one(weight, block, hidden[0], values[0], squares)
        return
    parts = -(-hidden_size // COLUMNS)
    for part in range(parts):
        first, last = hidden_size * part // parts, hidden_size * (part + 1) // parts
        for i in range(block.count):
            begin = (block.local + i) * weight.stride + first
            squares[block.lane + i] += convert(weight.numbers, begin, last - first, tile[i])
        for row in range(0, num_rows, 4):
            products_of_four(
                hidden[row, first:last],
                hidden[row + 1, first:last],
                hidden[row + 2, first:last],
                hidden[row + 3, first:last],
                tile,
                block.count,
                values[row : row + 4, block.lane :],
            )


@jit()
def prove(products, i, magnitude):
    """Note whether a row is proved; its values are NaN where an fp32 sum might have overflowed.

    Args:
        magnitude: float64, a bound on the absolute value of every sum, if it is finite.
    """
    products.proved[i] = magnitude <= LARGEST
    if not products.proved[i]:
        products.values[i] = np.nan


@jit()
def fp32_products(weight, block, rows, products):
    """Multiply in fp32, in any order of summation, and bound how far the products are off.

        |product − exact| <= (γ_{D + 4} + u) ‖h‖ ‖w‖ + η (2 D + sqrt(D) (‖h‖ + ‖w‖))

    γ_n = n u / (1 − n u) is the error of an fp32 sum of n terms, with or without fused
    multiply-adds, for every order of summation (Higham, "Accuracy and Stability of Numerical
    Algorithms", §3.1), with Cauchy-Schwarz for Σ |h w|; u is that of the definition's own rounding.
    η covers numbers that are subnormal, or flushed to zero. ‖w‖² itself is a sum in fp32, each of
    whose squares may be flushed.
    """
    multiply(weight, block, rows.hidden, products)
    squares, hidden_size = products.squares, rows.hidden.shape[1]
    spread = (hidden_size + 4) * UNIT
    gamma = spread / (1.0 - spread)
    unit, rounding = (gamma + UNIT) * (1.0 + 8.0 * UNIT), 1.0 + 2.0 * gamma
    most = math.sqrt(largest_size(squares) * rounding + hidden_size * TINY)
    for j in range(BLOCK):
        squares[j] = F32(math.sqrt(F64(squares[j]) * rounding + hidden_size * TINY) * unit)
    for i in range(len(rows.norms)):
        norm = rows.norms[i]
        lost = 1.01 * TINY * (2.0 * hidden_size + math.sqrt(hidden_size) * (norm + most))
        factor, rest = F32(norm * (1.0 + 8.0 * UNIT)), F32(lost + 2.0 * TINY)
        for j in range(BLOCK):
            products.errors[i, j] = factor * squares[j] + rest
        prove(products, i, norm * most * rounding + lost if spread <= 0.25 else np.inf)


@jit()
def quantise(rows, num_rows):
    """Return the first hidden states in 16 bits, and three factors of each.

    Proof: `tpsample.screening.int8_copy`, whose limbs are one number here.

    Returns:
        int16 [R, D], and float64 [R, 3]: the unit, then what multiplies ‖w‖ and the residual's norm
        in the bound of a product's error.
    """
    hidden = np.empty((num_rows, rows.hidden.shape[1]), I16)
    factors = np.empty((num_rows, 3))
    for i in range(num_rows):
        norm, lost = rows.norms[i], 0.0
        unit = F32(largest_size(rows.hidden[i]) / (127 * 256))
        if not (unit >= F32(TINY) and math.isfinite(unit)):
            unit = F32(1)
        for d in range(hidden.shape[1]):
            x = F64(rows.hidden[i, d])
            whole = np.rint(x / F64(unit))
            whole = whole if math.isfinite(whole) else 0.0
            hidden[i, d] = I16(whole)
            lost += (x - whole * F64(unit)) ** 2
        lost = math.sqrt(lost)
        rounding = ROUNDING * (norm + lost)
        of_norm, of_residual = lost + DEFINITION_ERROR * norm + rounding, norm + lost + rounding
        factors[i, 0], factors[i, 1], factors[i, 2] = unit, of_norm, of_residual
    return hidden, factors


@jit(fastmath=SUMS)
def integer_dot(weights, begin, hidden, first, last):
    """Return Σ q z of up to EXACT_COLUMNS int8 and int16 numbers, exactly."""
    total = I32(0)
    for d in range(first, last):
        total += I32(weights[U64(begin + d)]) * I32(hidden[U64(d)])
    return total


@jit()
def int8_products(copy, quantised, block, rows, products):
    """Multiply an 8-bit copy by what `quantise` returns, and bound how far the products are off."""
    hidden, factors = quantised
    num_rows, hidden_size = hidden.shape
    most = largest_size(copy.norm[block.local : block.local + block.count])
    for row in range(num_rows):
        unit, of_norm, of_residual = factors[row]
        flushed = TINY * hidden_size * (3.0 + rows.norms[row] + most) * 1.01 + 2.0 * TINY
        for i in range(block.count):
            v, j, whole = block.local + i, block.lane + i, I64(0)
            for first in range(0, hidden_size, EXACT_COLUMNS):
                last = min(first + EXACT_COLUMNS, hidden_size)
                whole += integer_dot(copy.numbers, v * hidden_size, hidden[row], first, last)
            products.values[row, j] = F32(F64(whole) * unit * F64(copy.scale[v]))
            error = of_norm * F64(copy.norm[v]) + of_residual * F64(copy.residual_norm[v])
            products.errors[row, j] = F32((error + flushed) * (1.0 + 8.0 * UNIT))
        prove(products, row, 4.0 * rows.norms[row] * most)


@jit()
def float64_products(weight, block, hidden, products):
    """Multiply in float64; `squares` are then how far the sums are off, over ‖h‖."""
    multiply(weight, block, hidden, products)
    unit = hidden.shape[1] * UNIT_64 * 1.01
    for j in range(BLOCK):
        products.squares[j] = math.sqrt(products.squares[j]) * unit


@jit()
def round_products(weight, block, rows, i, products, out):
    """Round a row's float64 products once to fp32; those that are not decided are added exactly."""
    sums, units, norm, undecided = products.values[i], products.squares, rows.norms[i], 0
    for j in range(BLOCK):
        error = norm * units[j]
        out[j] = F32(sums[j])
        # A sum that is not finite counts as undecided, which is rare.
        undecided += F32(sums[j] - error) != F32(sums[j] + error)
    if undecided:
        for j in range(block.lane, block.lane + block.count):
            if not is_decided(sums[j], norm * units[j]):
                first = (block.local + j - block.lane) * weight.stride
                out[j] = exact_dot(weight.numbers, first, rows.hidden[i])
