"""Products of a block of weight rows and some hidden states: fp32 with a bound, or float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba.extending import overload
from numba.np.numpy_support import as_dtype

from tpsample.backends.numba_.kernels.compiling import F32, F64, INNER, SUMS, U16, U64, jit
from tpsample.backends.numba_.kernels.inputs import BLOCK, aligned_zeros
from tpsample.backends.numba_.kernels.limb_products import (
    Limbs,
    limbs_of,
    multiply_limbs,
    take_limbs,
)
from tpsample.backends.numba_.kernels.numbers import (
    UNIT_64,
    as_fp32,
    dot_64,
    exact_product,
    is_decided,
    largest_size,
    least_and_largest,
    no_overflow,
    quantum_of,
    scaled,
    two_to,
)
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.backends.numba_.kernels.tile_dots import TILE, TILE_DEPTH, tile_dots
from tpsample.backends.numba_.kernels.vectors import (
    HAS_BF16,
    IDS,
    LANES,
    PADDING,
    ROWS,
    dots,
    dots_and_squares,
    fetch,
)
from tpsample.backends.screening.bound import LARGEST, TINY, UNIT

COLUMNS = 640
"""Most columns that are multiplied at once: 64 rows and 64 ids of them are 320 KB in fp32, which a
core's second cache holds."""
AHEAD = 8192
"""Bytes of weights that are asked for before they are converted: what memory sends in 0.5 µs."""
CACHED_ROWS = 8
"""Rows that are multiplied by all ids of a block before the next ones; the first cache holds them.
"""


PAIRS = LANES.bit_length() - 1
"""Additions that make one sum of LANES in pairs."""
SCALE_BITS = 512
"""Between those of `scaled` weights, so that no product of one row overflows or is subnormal."""


class Products(NamedTuple):
    """Products of a block, and the memory to make them.

    Attributes:
        values: [R or more, BLOCK], fp32 or float64.
        errors: fp32 [R], how far the fp32 values of a row are off at most.
        proved: bool [R]. In fp32: whether `errors` holds; if not, the row's values are NaN. In
            float64: whether the sums round to fp32 as exact ones do.
        squares: [BLOCK], of the type of the values; of fp32 Σ w² of each id, else see
            `float64_products`.
        size: D.
        hidden: [R or more, ≥ D], the hidden states in that type; zeros fill up several rows. One
            row in float64 is 2^SCALE_BITS times as large.
        bf16, tiles: the same in bf16, or empty; see `TakenRows`.
        tile_sums: fp32 [BLOCK, TILE], what `tile_dots` returns.
        tile: fp32 [BLOCK · COLUMNS], converted weights; one row needs none, nor do numbers that are
            multiplied as they lie in memory. In float64 it would take more than a core's cache.
        limbs: of float64 products; see `limb_products`.
    """

    values: np.ndarray
    errors: np.ndarray
    proved: np.ndarray
    squares: np.ndarray
    size: int
    hidden: np.ndarray
    bf16: np.ndarray
    tiles: np.ndarray
    tile_sums: np.ndarray
    tile: np.ndarray
    limbs: Limbs


@jit(allocates=True)
def products_of(rows, dtype):
    """Return the memory of products of some rows in fp32 or float64."""
    several, num_rows, size = len(rows.hidden) > 1, len(rows.norms), rows.hidden.shape[1]
    hidden = aligned_zeros((len(rows.hidden), padded(size) if several else size), dtype)
    scale = 1.0 if several or hidden.itemsize == 4 else 2.0**SCALE_BITS
    for i in range(len(hidden)):
        for d in range(hidden.shape[1]):
            hidden[i, d] = rows.hidden[i, d] * scale if d < size else 0
    return Products(
        np.empty((len(hidden), BLOCK), dtype),
        np.empty(num_rows, F32),
        np.empty(num_rows, np.bool_),
        np.empty(BLOCK, dtype),
        size,
        hidden,
        rows.bf16,
        rows.tiles,
        aligned_zeros((BLOCK if len(rows.tiles) else 0, TILE), F32),
        aligned_zeros((BLOCK * COLUMNS if several else 0,), F32),
        limbs_of(rows, hidden.itemsize == 8),
    )


@jit()
def padded(size):
    """Return the number of columns with padding."""
    return -(-size // PADDING) * PADDING


@jit()
def convert(weight, first, size, out):
    """Convert some weights of a row to the type of `out`."""
    part = weight[first : first + size]
    for d in range(size):
        out[d] = as_fp32(part[d])
    out[size : padded(size)] = 0


@jit()
def ids_of_turn(i, apart):
    """Return the ids that turn i of a block reads at once: four, or one that is left.

    A core has more lines of memory under way where it reads runs that lie far apart. So the four
    ids are a quarter of the block from each other.

    Returns:
        The first id, how far the next one is from it, and how many they are.
    """
    return (i, apart, 4) if i < apart else (i + 3 * apart, 0, 1)


@jit(fastmath=SUMS)
def products_of_four(numbers, begin, step, hidden):
    """Multiply one row by the weights of four ids in fp32, in any order.

    Args:
        begin, step: uint64, where the first id begins, and how far the next one is from it.

    Returns:
        The four products, then the four Σ w².
    """
    # Unsigned, because a signed index that might be negative keeps the loop from being vector code.
    second, third, fourth = begin + step, begin + U64(2) * step, begin + U64(3) * step
    a, b, c, d = F32(0), F32(0), F32(0), F32(0)
    aa, bb, cc, dd = F32(0), F32(0), F32(0), F32(0)
    for column in range(len(hidden)):
        h, at = hidden[column], U64(column)
        x, y = as_fp32(numbers[begin + at]), as_fp32(numbers[second + at])
        z, w = as_fp32(numbers[third + at]), as_fp32(numbers[fourth + at])
        a, b, c, d = a + x * h, b + y * h, c + z * h, d + w * h
        aa, bb, cc, dd = aa + x * x, bb + y * y, cc + z * z, dd + w * w
    return (a, b, c, d), (aa, bb, cc, dd)


@jit()
def products_of_one(weight, block, hidden, out, squares):
    """Multiply the weights of a block by one row in fp32, in any order; squares are Σ w²."""
    stride, apart = U64(weight.stride), block.count // 4
    for i in range(block.count - 3 * apart):
        id_, step, count = ids_of_turn(i, apart)
        begin = U64(block.local + id_) * stride
        found, sizes = products_of_four(weight.numbers, begin, U64(step) * stride, hidden)
        for k in range(count):
            lane = block.lane + id_ + k * step
            out[lane], squares[lane] = found[k], sizes[k]


@jit()
def add_dots(hidden, column, numbers, begin, stride, size, block, products):
    """Add the products of rows and a block over some columns, and in fp32 the squares.

    Args: as in `tpsample.backends.numba_.kernels.vectors`.
    """
    values, squares = products.values, products.squares
    for few in range(0, len(hidden), CACHED_ROWS):
        for lane in range(0, BLOCK, IDS):
            id_, count = lane - block.lane, block.count
            if id_ <= -IDS or id_ >= count:
                continue
            of_ids = numbers, begin, stride, id_, count, size, values, lane, squares
            if few == 0:
                dots_and_squares(hidden, 0, column, *of_ids)
            for row in range(larger(few, ROWS), smaller(few + CACHED_ROWS, len(hidden)), ROWS):
                dots(hidden, row, column, *of_ids)


def add_unconverted_dots(weight, block, first, size, products):
    """Add products of numbers as they lie in memory, if weight, rows and processor allow it.

    Returns:
        Whether they were added. Python itself has no such instruction.
    """
    return False


@overload(add_unconverted_dots, jit_options=INNER)
def _compiled_add_unconverted_dots(weight, block, first, size, products):
    dtypes = as_dtype(weight[0].dtype), as_dtype(products[0].dtype)
    is_bf16 = dtypes == (U16, F32)
    if dtypes[0] != F32 and not (is_bf16 and HAS_BF16):
        return lambda weight, block, first, size, products: False

    def add(weight, block, first, size, products):
        if size % PADDING != 0:
            return False
        begin, stride = block.local * weight.stride + first, weight.stride
        add_dots(products.hidden, first, weight.numbers, begin, stride, size, block, products)
        return True

    def add_bf16(weight, block, first, size, products):
        if not len(products.bf16):
            return False
        numbers, begin = weight.numbers, block.local * weight.stride + first
        in_tiles = block.count == BLOCK and len(products.tiles)
        hidden = products.bf16[:ROWS] if in_tiles else products.bf16
        add_dots(hidden, first, numbers, begin, weight.stride, size, block, products)
        if in_tiles:
            add_tiles(numbers, begin, weight.stride, first, size, products)
        return True

    return add_bf16 if is_bf16 else add


@jit()
def add_tiles(numbers, begin, stride, first, size, products):
    """Add the products of all rows but the first ROWS, and of a whole block, over some columns.

    Args:
        numbers, begin, stride: the weights, as `tile_dots` takes them.
        first, size: the columns.
    """
    values, sums, tiles = products.values, products.tile_sums, products.tiles
    for tile in range(len(tiles)):
        place = (tile * tiles.shape[1] + first // PADDING) * TILE * TILE
        tile_dots(tiles, place, 0, numbers, begin, 0, stride, size // PADDING, 1, sums)
        row = ROWS + tile * TILE
        for i in range(smaller(TILE, len(values) - row)):
            for j in range(BLOCK):
                values[row + i, j] += sums[j, i]


@jit()
def multiply(weight, block, products):
    """Multiply the weights of a block by several hidden states, in the type of the products.

    Values and squares are 0 in the lanes outside of the block, if they were 0 in all lanes.
    """
    hidden, tile = products.hidden, products.tile
    for first in range(0, products.size, COLUMNS):
        size = smaller(COLUMNS, products.size - first)
        if add_unconverted_dots(weight, block, first, size, products):
            continue
        later = (AHEAD // (size * weight.numbers.itemsize) + 1) * weight.stride
        for i in range(block.count):
            begin = (block.local + i) * weight.stride + first
            fetch(weight.numbers, begin + later, size)
            convert(weight.numbers, begin, size, tile[i * COLUMNS : (i + 1) * COLUMNS])
        add_dots(hidden, first, tile, 0, COLUMNS, padded(size), block, products)
    if block.count < BLOCK:
        for j in range(BLOCK):
            if not block.lane <= j < block.lane + block.count:
                products.squares[j] = 0
                for i in range(len(hidden)):
                    products.values[i, j] = 0


@jit(inline=True)
def prove(products, i, magnitude):
    """Note whether a row is proved; its values are NaN where an fp32 sum might have overflowed.

    Args:
        magnitude: float64, a bound on the absolute value of every sum, if it is finite.
    """
    products.proved[i] = magnitude <= LARGEST
    if not products.proved[i]:
        products.values[i] = np.nan


@jit()
def depth_of(products):
    """Return how many additions a product goes through at most, until its sum is complete.

    The products of one row are added in any order. Those of several rows are added by lanes: each
    lane adds its share of COLUMNS, then the lanes are added in pairs, then the parts of the sum.
    A tile adds PADDING columns at a time.
    """
    size = products.size
    if len(products.hidden) == 1:
        return size
    times, columns = -(-size // COLUMNS), smaller(COLUMNS, padded(size))
    of_tile = TILE_DEPTH + columns // PADDING if len(products.tiles) else 0
    return larger(of_tile, columns // LANES + PAIRS) + times


@jit()
def fp32_products(weight, block, rows, products):
    """Multiply in fp32, and bound how far the products are off.

        |product − exact| <= (γ_{n + 4} + u) ‖h‖ ‖w‖ + η (2 D + sqrt(D) (‖h‖ + ‖w‖))

    The longest weight row of the block gives ‖w‖ for all of its ids.
    n is `depth_of`. γ_n = n u / (1 − n u) is the error of an fp32 sum each of whose terms goes
    through n additions at most; with or without fused multiply-adds (Higham, "Accuracy and
    Stability of Numerical Algorithms", §3.1 and §4.2). Cauchy-Schwarz bounds Σ |h w|; u is the
    error of the definition's own rounding. η covers numbers that are subnormal, or flushed to zero.
    ‖w‖² itself is a sum in fp32, each of whose squares and partial sums may be flushed.
    """
    products.values[:], products.squares[:] = 0, 0
    if len(products.hidden) == 1:
        row = products.hidden[0]
        products_of_one(weight, block, row, products.values[0], products.squares)
    else:
        multiply(weight, block, products)
    size = products.size
    spread = (depth_of(products) + 4) * UNIT
    gamma = spread / (1.0 - spread)
    unit, rounding = (gamma + UNIT) * (1.0 + 8.0 * UNIT), 1.0 + 2.0 * gamma
    most = math.sqrt(largest_size(products.squares) * rounding + 2 * size * TINY)
    for i in range(len(rows.norms)):
        norm = rows.norms[i]
        lost = 1.01 * TINY * (2.0 * size + math.sqrt(size) * (norm + most))
        products.errors[i] = F32((norm * most * unit + lost) * (1.0 + 8.0 * UNIT) + 2.0 * TINY)
        prove(products, i, norm * most * rounding + lost if spread <= 0.25 else np.inf)


@jit(fastmath=SUMS)
def scaled_products_of_four(numbers, begin, step, hidden):
    """Return Σ w h of the `scaled` weights of four ids, in float64 and any order.

    Args: as in `products_of_four`.
    """
    second, third, fourth = begin + step, begin + U64(2) * step, begin + U64(3) * step
    a, b, c, d = F64(0), F64(0), F64(0), F64(0)
    for column in range(len(hidden)):
        h, at = hidden[column], U64(column)
        a, b = a + scaled(numbers[begin + at]) * h, b + scaled(numbers[second + at]) * h
        c, d = c + scaled(numbers[third + at]) * h, d + scaled(numbers[fourth + at]) * h
    return a, b, c, d


@jit()
def multiply_scaled(weight, block, i, apart, count, products):
    """Multiply the finite weights of some ids of a block by the one row in float64.

    Args:
        i, apart, count: the ids, as `ids_of_turn` returns them.
    """
    stride = U64(weight.stride)
    begin, step = U64(block.local + i) * stride, U64(apart) * stride
    found = scaled_products_of_four(weight.numbers, begin, step, products.hidden[0])
    unit = two_to(1023 - (15 if weight.fraction_bits == 10 else 127) - SCALE_BITS)
    for k in range(count):
        products.values[0, block.lane + i + k * apart] = found[k] * unit


@jit()
def bound_sums(weight, block, i, apart, count, rows, rows_ratio, products):
    """Find how far the float64 sums of some ids are off, over ‖h‖; return a bound of ‖w‖ / q_w.

    Args:
        i, apart, count: the ids, as `ids_of_turn` returns them.
        rows_ratio: the largest ‖h‖ / q_h; see `float64_products`.
    """
    stride = U64(weight.stride)
    begin, step = U64(block.local + i) * stride, U64(apart) * stride
    least, most = least_and_largest(weight.numbers, begin, step, products.size)
    norm = 1.01 * math.sqrt(products.size) * most
    ratio = norm / quantum_of(least, weight.fraction_bits)
    error = 0.0 if rows_ratio * ratio <= 2.0**53 else 1.01 * UNIT_64 * products.size * norm
    for k in range(count):
        lane = block.lane + i + k * apart
        products.squares[lane] = error
        if len(products.hidden) == 1 and not math.isfinite(most):  # `scaled` weights are finite
            first = (block.local + i + k * apart) * weight.stride
            total, _ = dot_64(weight.numbers, first, rows.hidden[0])
            products.values[0, lane] = total
    return ratio


@jit()
def limb_products(weight, block, rows, products):
    """Make the `float64_products` of a whole block from limbs, if these hold most of its weights.

    Returns:
        Whether they were made.
    """
    limbs, apart, others = products.limbs, BLOCK // 4, 0
    if not len(limbs.rows) or block.count < BLOCK or weight.fraction_bits > 10:
        return False
    for i in range(apart):
        held = take_limbs(weight, block, i, apart, products.size, limbs)
        products.squares[i] = 0 if held else 1
        others += not held
    if others > apart // 4:
        return False
    multiply_limbs(limbs, products.values)
    products.squares[apart:], products.proved[:] = 0, others == 0
    for i in range(apart if others else 0):
        if products.squares[i]:
            for j in range(i, BLOCK, apart):
                first = (block.local + j) * weight.stride
                for row in range(len(rows.norms)):
                    total, _ = dot_64(weight.numbers, first, rows.hidden[row])
                    products.values[row, j] = total
            bound_sums(weight, block, i, apart, 4, rows, np.inf, products)
    return True


@jit()
def float64_products(weight, block, rows, products):
    """Multiply in float64; `squares` are then how far the sums are off at most, over ‖h‖.

    A sum is exact in any order if its terms are multiples of q and their sizes add up to at most
    2^53 q. Then every partial sum is a float64 number. Products of bf16 numbers often fulfil that,
    and then their sum often is the midpoint of two fp32 numbers. It follows from

        ‖h‖ ‖w‖ <= 2^53 q_h q_w      ‖w‖ <= sqrt(D) max |w|

    where q_h divides all numbers of a row, and q_w those of the ids of a turn. Other sums are off
    by D u ‖h‖ ‖w‖ (1 + D u) at most. 1 % covers the roundings here.
    """
    if limb_products(weight, block, rows, products):
        return
    rows_ratio, largest, apart = 0.0, 0.0, block.count // 4
    products.values[:], products.squares[:] = 0, 0
    for i in range(len(rows.norms)):
        rows_ratio = larger(rows_ratio, rows.norms[i] / rows.quanta[i])
    several = len(products.hidden) > 1
    if several:
        multiply(weight, block, products)
    for i in range(block.count - 3 * apart):
        ids = ids_of_turn(i, apart)
        if not several:
            multiply_scaled(weight, block, *ids, products)
        ratio = bound_sums(weight, block, *ids, rows, rows_ratio, products)
        largest = larger(largest, ratio)
    for i in range(len(rows.norms)):
        products.proved[i] = rows.norms[i] * largest <= 2.0**53 * rows.quanta[i]


@jit()
def round_products(weight, block, rows, i, products, out):
    """Round a row's float64 products once to fp32; those that are not decided are added exactly."""
    sums, units, norm, undecided = products.values[i], products.squares, rows.norms[i], 0
    for j in range(BLOCK):
        out[j] = no_overflow(F32(sums[j]))
    if products.proved[i]:
        return
    for j in range(BLOCK):
        error = norm * units[j]
        # A sum that is not finite counts as undecided, which is rare.
        undecided += F32(sums[j] - error) != F32(sums[j] + error)
    if undecided:
        for j in range(block.lane, block.lane + block.count):
            if not is_decided(sums[j], norm * units[j]):
                first = (block.local + j - block.lane) * weight.stride
                out[j] = exact_product(weight.numbers, first, rows.hidden[i])
