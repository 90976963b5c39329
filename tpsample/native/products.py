"""Products of 64 weight rows and some hidden states, in fp32 with a bound, or in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.native.compiling import SUMS, jit
from tpsample.native.noise import BLOCK
from tpsample.native.numbers import F32, F64, I16, I32, I64, U64, as_fp32
from tpsample.screening.bound import TINY, UNIT
from tpsample.screening.int8_copy import BLOCKS
from tpsample.screening.int8_pass import DEFINITION_ERROR, ROUNDING

COLUMNS = 640
"""Most columns that are multiplied at once: 64 rows and 64 ids of them are 320 KB in fp32, which a
core's second cache holds."""

EXACT_COLUMNS = 512
"""Columns whose 8-bit times 16-bit products fit an int32: 512 · 127 · 32512 < 2^31."""


class Copy(NamedTuple):
    """An 8-bit copy of a weight (`Int8Copy`) and the rows in 16 bits; no rows without a copy.

    Attributes:
        numbers: int8 [V_local · D], flat.
        scale, norm: fp32 [V_local]; residual: fp32 [V_local, 8].
        hidden: int16 [R, D]; unit: float64 [R]; of_blocks: float64 [R, 8]; of_row: float64 [R].
    """

    numbers: np.ndarray
    scale: np.ndarray
    norm: np.ndarray
    residual: np.ndarray
    hidden: np.ndarray
    unit: np.ndarray
    of_blocks: np.ndarray
    of_row: np.ndarray


@jit(fastmath=SUMS)
def convert(weight, first, size, out):  # type: ignore[no-untyped-def]
    """Convert some weights of a row to the type of `out`; return the sum of their squares."""
    part, total = weight[first : first + size], out.dtype.type(0)
    for d in range(size):
        x = out.dtype.type(as_fp32(part[d]))
        out[d] = x
        total += x * x
    return total


@jit(fastmath=SUMS)
def products_of_one(weight, local, count, lane, hidden, out, squares):  # type: ignore[no-untyped-def]
    """Multiply `count` weight rows by one row in fp32, in any order; squares are Σ w²."""
    size = len(hidden)
    # Unsigned, because a signed index that might be negative keeps the loop from being vector code.
    for i in range(count):
        begin = U64((local + i) * weight.stride)
        total, square = F32(0), F32(0)
        for d in range(size):
            x = as_fp32(weight.numbers[begin + U64(d)])
            total += x * hidden[d]
            square += x * x
        out[lane + i], squares[lane + i] = total, square


@jit(fastmath=SUMS)
def products_of_four(h0, h1, h2, h3, tile, count, out):  # type: ignore[no-untyped-def]
    """Add the products of four rows and `count` ids to out, [4, ≥ count], two ids at a time.

    Args:
        h0, h1, h2, h3: [size], columns of the hidden states.
        tile: [≥ count + 1, ≥ size], the weights, with a row behind the last id.
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
def multiply(weight, local, count, lane, hidden, tile, out, squares):  # type: ignore[no-untyped-def]
    """Multiply `count` weight rows from `local` on by all hidden states, in fp32 or float64.

    Args:
        hidden: [R, D], R a multiple of four, or 1.
        tile: [65, COLUMNS], scratch of the same type.
        out: [R, 64] of the same type; the first product is at `lane`.
        squares: [64] of the same type, Σ w² of each id.
    """
    num_rows, hidden_size = hidden.shape
    for j in range(lane, lane + count):
        squares[j] = 0
        for row in range(num_rows):
            out[row, j] = 0
    parts = -(-hidden_size // COLUMNS)
    for part in range(parts):
        first, last = hidden_size * part // parts, hidden_size * (part + 1) // parts
        for i in range(count):
            begin = (local + i) * weight.stride + first
            squares[lane + i] += convert(weight.numbers, begin, last - first, tile[i])
        if num_rows == 1:
            for i in range(count):
                out[0, lane + i] += dot(tile[i], hidden[0, first:last])
            continue
        for row in range(0, num_rows, 4):
            products_of_four(
                hidden[row, first:last],
                hidden[row + 1, first:last],
                hidden[row + 2, first:last],
                hidden[row + 3, first:last],
                tile,
                count,
                out[row : row + 4, lane : lane + count],
            )


@jit(fastmath=SUMS)
def dot(tile, hidden):  # type: ignore[no-untyped-def]
    """Return Σ w h of converted weights."""
    total = hidden.dtype.type(0)
    part = tile[: len(hidden)]
    for d in range(len(hidden)):
        total += part[d] * hidden[d]
    return total


@jit()
def fp32_products(  # type: ignore[no-untyped-def]
    weight, local, count, lane, rows, tile, squares, out, errors, bounds
):
    """Multiply in fp32, in any order of summation, and bound how far the products are off.

        |product − exact| <= (γ_{D + 4} + u) ‖h‖ ‖w‖ + η (2 D + sqrt(D) (‖h‖ + ‖w‖))

    γ is the error of an fp32 sum in any order (`tpsample.screening.bound`), with Cauchy-Schwarz for
    Σ |h w|; u is that of the definition's own rounding. η covers numbers that are subnormal, or
    flushed to zero. ‖w‖² itself is a sum in fp32, each of whose squares may be flushed.

    Args:
        weight, rows: see `tpsample.native.lm_head`.
        errors: fp32 [R, 64], out.
        bounds: float64 [R, 2], out: the largest error, and a bound on the absolute value of every
            sum; not a number, or infinite, where nothing is proved.
    """
    num_rows, hidden_size = len(rows.index), rows.hidden.shape[1]
    if len(rows.hidden) == 1:
        products_of_one(weight, local, count, lane, rows.hidden[0], out[0], squares)
    else:
        multiply(weight, local, count, lane, rows.hidden, tile, out, squares)
    spread = (hidden_size + 4) * UNIT
    gamma, most = spread / (1.0 - spread), F64(0)
    root = math.sqrt(hidden_size)
    for j in range(BLOCK):
        if j < lane or j >= lane + count:
            squares[j] = F32(0)
            continue
        norm = math.sqrt(F64(squares[j]) * (1.0 + 2.0 * gamma) + hidden_size * TINY)
        squares[j] = F32(norm * ((gamma + UNIT) * (1.0 + 8.0 * UNIT)))
        most = norm if norm > most or norm != norm else most
    for i in range(num_rows):
        norm = rows.norms[i]
        lost = 1.01 * TINY * (2.0 * hidden_size + root * (norm + most))
        bounds[i, 1] = norm * most * (1.0 + 2.0 * gamma) + lost if spread <= 0.25 else np.inf
        bounds[i, 0] = bounds[i, 1] * (gamma + UNIT) * 1.01 + 2.0 * lost
        factor, rest = F32(norm * (1.0 + 8.0 * UNIT)), F32(lost + TINY)
        for j in range(BLOCK):
            errors[i, j] = factor * squares[j] + rest


@jit(entry=True)
def quantise_rows(rows, num_rows, hidden, unit, of_blocks, of_row):  # type: ignore[no-untyped-def]
    """Fill the rows of a `Copy`. Twin: `tpsample.screening.int8_pass`, whose limbs are one number.

    Args:
        rows: fp32 [≥ num_rows, D].
    """
    hidden_size = rows.shape[1]
    for i in range(num_rows):
        largest, squares, lost = F32(0), 0.0, 0.0
        for d in range(hidden_size):
            largest = max(largest, abs(rows[i, d]))
        quantum = F32(F64(largest) / (127 * 256))
        if not (quantum >= F32(TINY) and math.isfinite(quantum)):
            quantum = F32(1)
        for block in range(BLOCKS):
            part = 0.0
            for d in range(hidden_size * block // BLOCKS, hidden_size * (block + 1) // BLOCKS):
                x = F64(rows[i, d])
                whole = np.rint(x / F64(quantum))
                whole = whole if math.isfinite(whole) else 0.0
                hidden[i, d] = I16(whole)
                part += x * x
                lost += (x - whole * F64(quantum)) * (x - whole * F64(quantum))
            squares += part
            of_blocks[i, block] = math.sqrt(part)
        norm, lost = math.sqrt(squares), math.sqrt(lost)
        rounding = ROUNDING * (norm + lost)
        for block in range(BLOCKS):
            of_blocks[i, block] += lost + rounding
        unit[i], of_row[i] = F64(quantum), lost + DEFINITION_ERROR * norm + rounding


@jit(fastmath=SUMS)
def integer_dot(weights, hidden):  # type: ignore[no-untyped-def]
    """Return Σ q z of up to EXACT_COLUMNS int8 and int16 numbers, exactly."""
    total = I32(0)
    for d in range(len(hidden)):
        total += I32(weights[d]) * I32(hidden[d])
    return total


@jit()
def int8_products(copy, local, count, lane, rows, out, errors, bounds):  # type: ignore[no-untyped-def]
    """Multiply an 8-bit copy. Arguments and promise are those of `fp32_products`."""
    num_rows, hidden_size = copy.hidden.shape
    most = F64(0)
    for row in range(num_rows):
        for j in range(BLOCK):
            errors[row, j] = F32(0)
    for i in range(count):
        v = local + i
        norm, begin = F64(copy.norm[v]), v * hidden_size
        most = norm if norm > most or norm != norm else most
        for row in range(num_rows):
            whole = I64(0)
            for first in range(0, hidden_size, EXACT_COLUMNS):
                last = min(first + EXACT_COLUMNS, hidden_size)
                whole += integer_dot(
                    copy.numbers[begin + first : begin + last], copy.hidden[row, first:last]
                )
            out[row, lane + i] = F32(F64(whole) * copy.unit[row] * F64(copy.scale[v]))
            error = copy.of_row[row] * norm
            for block in range(BLOCKS):
                error += copy.of_blocks[row, block] * F64(copy.residual[v, block])
            errors[row, lane + i] = F32(error * (1.0 + 8.0 * UNIT))
    for row in range(num_rows):
        norm = rows.norms[row]
        flushed = F32(TINY * hidden_size * (3.0 + norm + most) * 1.01 + TINY)
        worst = F32(0)
        for j in range(lane, lane + count):
            errors[row, j] = (errors[row, j] + flushed) * F32(1.0 + 4.0 * UNIT)
            worst = errors[row, j] if not errors[row, j] <= worst else worst
        bounds[row, 0], bounds[row, 1] = F64(worst), 4.0 * norm * most
