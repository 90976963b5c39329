"""Upper ends of the products of an 8-bit copy of a weight and some hidden states.

Hidden states are whole numbers of a unit, ĥ = t z. Most have 8 bits. A language model has a few
columns with numbers far above the others. If one unit made these numbers of 8 bits, nothing would
be left of the others. So some groups of columns, the WIDE, have 16 bits:

    t = max |h| / 127 of the other columns      z = rint(h / t) = 256 high + low

and high is 0 outside of them. The wide groups are those with the largest max |h| / ‖h‖ of any row.
A row by itself has a number as large as 127 t in each of D / (GROUP · WIDE) groups. Rounding takes
t / sqrt(12) of each of D numbers in the mean. So it loses at most sqrt(GROUP · WIDE / 12) / 127 =
1.8 % of its norm, and the copy of a weight loses 1 %. Other rows of a step may take its groups; the
bound counts what is lost. On 241 rows of the bundled model 9 groups of 144 leave 7 candidates a
row, and without them there are 210.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.byte_dots import dots_of_row, dots_of_rows
from tpsample.backends.numba_.kernels.compiling import F32, F64, I8, I32, I64, jit
from tpsample.backends.numba_.kernels.head import up, upper_ends
from tpsample.backends.numba_.kernels.inputs import BLOCK
from tpsample.backends.numba_.kernels.numbers import largest_size
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.backends.numba_.kernels.products import fp32_products, prove
from tpsample.backends.numba_.kernels.vectors import ROWS
from tpsample.backends.screening.bound import DEFINITION_ERROR, ROUNDING, TINY, UNIT
from tpsample.backends.screening.int8_copy import GROUP, OFFSET

WIDE = 16
"""One group of columns in so many has 16 bits."""


class Copy(NamedTuple):
    """An 8-bit copy of a weight, in blocks (`Int8Copy`).

    Kernels have None where there is none, and are then compiled without what reads a copy.

    Attributes:
        numbers: uint8 [blocks · width · BLOCK], flat; each is larger by OFFSET.
        scale, norm, residual_norm: fp32 [blocks · BLOCK].
        base: global id of the first lane.
        width: columns, a multiple of GROUP.
    """

    numbers: np.ndarray
    scale: np.ndarray
    norm: np.ndarray
    residual_norm: np.ndarray
    base: int
    width: int


class Quantised(NamedTuple):
    """Hidden states in whole numbers, and the memory of their products.

    Attributes:
        low: int8 [R, width].
        high: int8 [R, GROUP · wide groups].
        wide: int64 [wide groups], which these are.
        surplus: int32 [R], what OFFSET adds to the products of each.
        factors: fp32 [R, 4], rounded up: what the product is in units of; what multiplies ‖w‖ and
            the residual's norm in the bound of its error; the rest of the bound.
        sums: int32 [R, BLOCK].
    """

    low: np.ndarray
    high: np.ndarray
    wide: np.ndarray
    surplus: np.ndarray
    factors: np.ndarray
    sums: np.ndarray


@jit(allocates=True)
def quantise(copy, rows, num_rows):
    """Return the first hidden states in whole numbers; None without a copy.

    Proof: `tpsample.backends.screening.int8_copy`. The unit is so large that Σ |z| <= 2^23 + D / 2,
    so that sums of 127 |z| fit an int32.
    """
    if copy is None:
        return None
    wide = wide_groups(rows, num_rows, copy.width // GROUP)
    is_wide = np.zeros(copy.width // GROUP, np.bool_)
    is_wide[wide] = True
    low, high = np.zeros((num_rows, copy.width), I8), np.zeros((num_rows, GROUP * len(wide)), I8)
    surplus, factors = np.empty(num_rows, I32), np.empty((num_rows, 4), F32)
    for i in range(num_rows):
        hidden, total, most, most_of_all = rows.hidden[i], 0.0, 0.0, 0.0
        for d in range(len(hidden)):
            size = abs(F64(hidden[d]))
            total, most_of_all = total + size, larger(most_of_all, size)
            most = most if is_wide[d // GROUP] else larger(most, size)
        unit = F32(larger(larger(most / 127.0, most_of_all / (127.0 * 256.0)), total / 2.0**23))
        if not (unit >= F32(TINY) and math.isfinite(unit)):
            unit = F32(1)
        lost, counted = 0.0, 0
        for d in range(len(hidden)):
            number = whole_number(hidden[d], unit)
            counted += OFFSET * number
            low[i, d] = I8(number - high_part(number) * 256)
            lost += (F64(hidden[d]) - F64(number) * F64(unit)) ** 2
        for column in range(len(high[i])):
            d = wide[column // GROUP] * GROUP + column % GROUP
            if d < len(hidden):
                high[i, column] = I8(high_part(whole_number(hidden[d], unit)))
        surplus[i] = I32(counted)
        norm, lost, flushed = rows.norms[i], math.sqrt(lost), 1.01 * TINY * len(hidden)
        rounding, up_to = ROUNDING * (norm + lost), 1.0 + 8.0 * UNIT
        factors[i, 0] = unit
        factors[i, 1] = F32((lost + DEFINITION_ERROR * norm + rounding + flushed) * up_to)
        factors[i, 2] = F32((norm + lost + rounding) * up_to)
        factors[i, 3] = F32((flushed * (3.0 + norm) + 2.0 * TINY) * up_to)
    return Quantised(low, high, wide, surplus, factors, np.empty((num_rows, BLOCK), I32))


@jit(inline=True)
def whole_number(hidden, unit):
    """Return how many units a number of a hidden state is, int64."""
    number = np.rint(F64(hidden) / F64(unit))
    return I64(number) if math.isfinite(number) else I64(0)


@jit(inline=True)
def high_part(number):
    """Return high of number = 256 high + low, int64, where low is -128 … 127."""
    return (number + I64(128)) >> I64(8)


@jit(allocates=True)
def wide_groups(rows, num_rows, num_groups):
    """Return the groups of columns with the largest numbers beside the norm of a row, int64 [n]."""
    largest, groups = np.zeros(num_groups), np.empty(num_groups // WIDE, I64)
    for i in range(num_rows):
        if rows.norms[i] > 0.0:
            for d in range(rows.hidden.shape[1]):
                share = abs(F64(rows.hidden[i, d])) / rows.norms[i]
                largest[d // GROUP] = larger(largest[d // GROUP], share)
    for n in range(len(groups)):
        groups[n] = largest.argmax()
        largest[groups[n]] = -1.0
    return groups


@jit()
def first_products(copy, quantised, weight, block, rows, products):
    """Multiply all rows by the weight, or by the copy."""
    if copy is None:
        fp32_products(weight, block, rows, products)
    else:
        first, num_rows = block.base - copy.base, len(quantised.surplus)
        most = largest_size(copy.norm[first : first + BLOCK])
        for i in range(num_rows):
            prove(products, i, 4.0 * rows.norms[i] * most)
        low, high, wide, sums = quantised.low, quantised.high, quantised.wide, quantised.sums
        few, begin = num_rows % ROWS, first * copy.width
        for i in range(0, num_rows - few, ROWS):
            dots_of_rows(copy.numbers, begin, low, high, wide, i, sums)
        for i in range(num_rows - few, num_rows):
            dots_of_row(copy.numbers, begin, low, high, wide, i, sums)


@jit()
def first_ends(copy, quantised, block, products, i, out):
    """Find the upper ends, fp32 [BLOCK], of what `first_products` made for a row.

        product_v = s_v t n     its end: product_v + of_norm ‖w_v‖ + of_residual residual_v + rest

    They are NaN where nothing is proved.
    """
    if copy is None:
        upper_ends(products.values[i], products.errors[i], out)
    elif not products.proved[i]:
        out[:] = np.nan
    else:
        unit, of_norm, of_residual, rest = quantised.factors[i]
        first, sums, surplus = block.base - copy.base, quantised.sums[i], quantised.surplus[i]
        scale, norm = copy.scale[first : first + BLOCK], copy.norm[first : first + BLOCK]
        residual = copy.residual_norm[first : first + BLOCK]
        for j in range(BLOCK):
            product = F32(I32(sums[j] - surplus)) * (unit * scale[j])
            out[j] = up(product + (of_norm * norm[j] + of_residual * residual[j] + rest))
