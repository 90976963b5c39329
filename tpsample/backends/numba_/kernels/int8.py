"""Products of an 8-bit copy of a weight and some hidden states, with a bound of their errors."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I16, I32, I64, jit
from tpsample.backends.numba_.kernels.numbers import largest_size
from tpsample.backends.numba_.kernels.primitives import smaller
from tpsample.backends.numba_.kernels.products import fp32_products, prove
from tpsample.backends.screening.bound import DEFINITION_ERROR, ROUNDING, TINY, UNIT

EXACT_COLUMNS = 512
"""Columns whose 8-bit times 16-bit products fit an int32: 512 · 127 · 32512 < 2^31."""


class Copy(NamedTuple):
    """An 8-bit copy of a weight (`Int8Copy`).

    Kernels have None where there is none, and are then compiled without what reads a copy.

    Attributes:
        numbers: int8 [V_local · D], flat.
        scale, norm, residual_norm: fp32 [V_local].
    """

    numbers: np.ndarray
    scale: np.ndarray
    norm: np.ndarray
    residual_norm: np.ndarray


@jit(allocates=True)
def quantise(copy, rows, num_rows):
    """Return the first hidden states in 16 bits, and three factors of each; None without a copy.

    Proof: `tpsample.backends.screening.int8_copy`, whose limbs are one number here.

    Returns:
        int16 [R, D], and float64 [R, 3]: the unit, then what multiplies ‖w‖ and the residual's norm
        in the bound of a product's error.
    """
    if copy is None:
        return None
    hidden = np.empty((num_rows, rows.hidden.shape[1]), I16)
    factors = np.empty((num_rows, 3), F64)
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


@jit()
def integer_dot(weights, hidden):
    """Return Σ q z of up to EXACT_COLUMNS int8 and int16 numbers, exactly."""
    total = I32(0)
    for d in range(len(hidden)):  # without I32(…) the sums would be of 64 bits
        total = I32(total + I32(I32(weights[d]) * I32(hidden[d])))
    return total


@jit()
def int8_products(copy, quantised, block, rows, products):
    """Multiply an 8-bit copy by what `quantise` returns, and bound how far the products are off."""
    hidden, factors = quantised
    num_rows, hidden_size = hidden.shape
    last = block.local + block.count
    most = largest_size(copy.norm[block.local : last])
    residual = largest_size(copy.residual_norm[block.local : last])
    for row in range(num_rows):
        unit, of_norm, of_residual = factors[row]
        flushed = TINY * hidden_size * (3.0 + rows.norms[row] + most) * 1.01 + 2.0 * TINY
        for i in range(block.count):
            v, j, whole = block.local + i, block.lane + i, I64(0)
            for first in range(0, hidden_size, EXACT_COLUMNS):
                last = smaller(first + EXACT_COLUMNS, hidden_size)
                numbers = copy.numbers[v * hidden_size + first : v * hidden_size + last]
                whole += integer_dot(numbers, hidden[row, first:last])
            products.values[row, j] = F32(F64(whole) * unit * F64(copy.scale[v]))
        error = of_norm * most + of_residual * residual + flushed
        products.errors[row] = F32(error * (1.0 + 8.0 * UNIT))
        prove(products, row, 4.0 * rows.norms[row] * most)


@jit()
def first_products(copy, quantised, weight, block, rows, products):
    """Multiply the copy, or the weight if there is none, by the hidden states."""
    if copy is None:
        fp32_products(weight, block, rows, products)
    else:
        int8_products(copy, quantised, block, rows, products)
