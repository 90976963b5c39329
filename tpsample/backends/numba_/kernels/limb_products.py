"""Exact products of a block of 16-bit weights and several rows, from 8-bit limbs in tiles.

A number is a whole number of units, Σ d_i 256^i, and its limbs d_i are signed bytes. With four
limbs of a weight, and four or five of a number of a row,

    Σ w h = Σ_k 256^k C_k      C_k = Σ_{i + j = k} Σ d_i(w) d_j(h)

where each C_k is a sum of bytes' products in int32. Their sum is rounded once, to float64. It is
rounded to odd: to the neighbour whose last bit is 1, if it is no float64 number. So a second
rounding, to fp32, is the same as one of the exact sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I8, I32, I64, U32, U64, jit
from tpsample.backends.numba_.kernels.inputs import BLOCK, aligned_zeros
from tpsample.backends.numba_.kernels.numbers import as_fp32, least_and_largest, quantum_of
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.backends.numba_.kernels.tile_dots import LINE, TILE, may_use_tiles, tile_dots

WEIGHT_LIMBS, ROW_LIMBS = 4, 5
SUMS = WEIGHT_LIMBS + ROW_LIMBS - 1
FEW_ROWS = 8
"""So few rows are multiplied in float64: a tile has room for twice as many."""
MOST_COLUMNS = 2**15 - 1
"""Four products of bytes per column are less than 2^16, so that a sum of them fits int32."""
WEIGHT_CARRIES, ROW_CARRIES = 0x808080, 0x80808080
"""128 in each byte but the highest. A number to which it is added, and whose same bits are turned
then, has its limbs as signed bytes."""


class Limbs(NamedTuple):
    """The limbs of some rows, and memory for those of a block.

    Attributes:
        rows: uint32 [limbs, tiles, lines of columns, TILE, TILE], see `tile_dots.tile_dots`. There
            are four limbs or five, or none where products are made in float64.
        units: float64 [R], of the rows.
        block: int8 [WEIGHT_LIMBS · BLOCK · width], of the weights of a block.
        block_units: float64 [BLOCK].
        sums: int32 [SUMS, BLOCK, TILE], C_k; 0 where there is none.
        totals: float64 [BLOCK, TILE], their sums.
    """

    rows: np.ndarray
    units: np.ndarray
    block: np.ndarray
    block_units: np.ndarray
    sums: np.ndarray
    totals: np.ndarray


@jit()
def limbs_needed(rows):
    """Return how many limbs hold the numbers of every row, or 0."""
    count = WEIGHT_LIMBS
    for i in range(len(rows.norms)):
        _, most = least_and_largest(rows.hidden[i], U64(0), U64(0), rows.hidden.shape[1])
        while not quantum_of(most, 8 * count - 3) <= rows.quanta[i]:
            count += 1
            if count > ROW_LIMBS:
                return 0
        if most == np.inf:
            return 0
    return count


@jit(allocates=True)
def limbs_of(rows, used):
    """Return `Limbs` of `TakenRows`, without tiles if they are not used."""
    num_rows, size = len(rows.norms), rows.hidden.shape[1]
    used &= num_rows > FEW_ROWS and size <= MOST_COLUMNS
    count = limbs_needed(rows) if used and may_use_tiles() else 0
    tiles, lines = -(-num_rows // TILE), -(-size // LINE) if count else 0
    ids, units = BLOCK if count else 0, np.empty(num_rows, F64)
    out = aligned_zeros((count, tiles, lines, TILE, TILE), U32)
    for i in range(num_rows if count else 0):
        _, most = least_and_largest(rows.hidden[i], U64(0), U64(0), size)
        units[i] = quantum_of(most, 8 * count - 3)
        for d in range(size):
            whole = I64(rows.hidden[i, d] / units[i])
            limbs = U64(whole + ROW_CARRIES) ^ U64(ROW_CARRIES)
            for k in range(count):
                byte = U32(limbs >> U64(8 * k)) & U32(255)
                out[k, i // TILE, d // LINE, d % LINE // 4, i % TILE] |= byte << U32(8 * (d % 4))
    return Limbs(
        out,
        units,
        aligned_zeros((WEIGHT_LIMBS * ids * lines * LINE,), I8),
        np.empty(ids, F64),
        aligned_zeros((SUMS, ids, TILE), I32),
        np.empty((ids, TILE), F64),
    )


@jit()
def take_limbs(weight, block, first, apart, size, limbs):
    """Store the limbs of the weights of four ids of a whole block, if limbs hold all of them.

    Args:
        first, apart: the first id of the block, and how far the next one is from it.

    Returns:
        Whether they do.
    """
    stride, local = U64(weight.stride), block.local + first
    least, most = least_and_largest(weight.numbers, U64(local) * stride, U64(apart) * stride, size)
    unit = quantum_of(most, 8 * WEIGHT_LIMBS - 3)
    held = unit <= quantum_of(least, weight.fraction_bits) and unit >= 2.0**-127 and most < np.inf
    for k in range(4 if held else 0):
        limbs.block_units[first + k * apart] = unit
        begin = (local + k * apart) * weight.stride
        take_row(weight, begin, F32(1.0 / unit), size, limbs, first + k * apart)
    return held


@jit()
def take_row(weight, begin, scale, size, limbs, id_):
    """Store the limbs of the weights of one id; times `scale` these are whole numbers."""
    part, apart = weight.numbers[begin : begin + size], len(limbs.block) // WEIGHT_LIMBS
    place = id_ * (apart // BLOCK)
    first, second = limbs.block[place : place + size], limbs.block[place + apart :]
    third, fourth = limbs.block[place + 2 * apart :], limbs.block[place + 3 * apart :]
    for d in range(size):
        whole = U32(I32(as_fp32(part[d]) * scale) + I32(WEIGHT_CARRIES)) ^ U32(WEIGHT_CARRIES)
        first[d], second[d] = I8(whole), I8(whole >> U32(8))
        third[d], fourth[d] = I8(whole >> U32(16)), I8(whole >> U32(24))


@jit()
def add_sums(limbs):
    """Put Σ_k 256^k C_k of a tile of rows, rounded to odd, into `totals`."""
    sums, totals = limbs.sums, limbs.totals
    for j in range(BLOCK):
        for i in range(TILE):
            low = I64(sums[0, j, i]) + (I64(sums[1, j, i]) << 8)
            low += (I64(sums[2, j, i]) << 16) + (I64(sums[3, j, i]) << 24)
            high = I64(sums[4, j, i]) + (I64(sums[5, j, i]) << 8) + (low >> 32)
            high += (I64(sums[6, j, i]) << 16) + (I64(sums[7, j, i]) << 24)
            upper, lower = F64(high) * 2.0**32, F64(low & (2**32 - 1))
            total = upper + lower
            rest, bits = lower - (total - upper), bits_as(total, I64)
            away = I64(1) if (rest > 0) == (total > 0) else I64(-1)
            bits += away if rest != 0 and bits & 1 == 0 else I64(0)
            totals[j, i] = bits_as(bits, F64)


@jit()
def multiply_limbs(limbs, values):
    """Multiply the weights whose limbs are stored by all rows.

    Args:
        values: float64 [R or more, BLOCK], out: exact products, rounded to odd.
    """
    apart, (row_limbs, tiles, lines) = len(limbs.block) // WEIGHT_LIMBS, limbs.rows.shape[:3]
    of_tile = lines * TILE * TILE
    of_limb = tiles * of_tile
    for tile in range(tiles):
        for k in range(WEIGHT_LIMBS + row_limbs - 1):
            first = larger(0, k + 1 - row_limbs)
            turns = smaller(WEIGHT_LIMBS - 1, k) - first + 1
            place = tile * of_tile + (k - first) * of_limb
            of_ids = limbs.block, first * apart, apart, lines * LINE
            tile_dots(limbs.rows, place, -of_limb, *of_ids, lines, turns, limbs.sums[k])
        add_sums(limbs)
        for i in range(smaller(TILE, len(limbs.units) - tile * TILE)):
            row = tile * TILE + i
            for j in range(BLOCK):
                values[row, j] = limbs.totals[j, i] * (limbs.units[row] * limbs.block_units[j])
