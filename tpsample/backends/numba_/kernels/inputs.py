"""Arguments of native kernels: weight rows, cut into blocks of ids, rows of a step, and memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.compiling import F32, F64, U16, U32, U64, jit
from tpsample.backends.numba_.kernels.numbers import as_fp32, least_and_largest, quantum_of
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.backends.numba_.kernels.tile_dots import LINE, TILE, may_use_tiles
from tpsample.backends.numba_.kernels.vectors import PADDING, ROWS
from tpsample.backends.screening.int8_copy import BLOCK
from tpsample.core.weight_format import FORMATS


class Weight(NamedTuple):
    """A range of the rows of a shard's weight.

    Logits take its place where they are there already. Then row r begins at r · stride, column v
    is the id first_id + v, and the range is one of columns.

    Attributes:
        numbers: flat, as `as_fp32` reads them; row v begins at v · stride.
        stride: numbers from one row to the next.
        first_id: global id of row 0.
        start, stop: the rows of the range.
        fraction_bits: of the significand of a number.
    """

    numbers: np.ndarray
    stride: int
    first_id: int
    start: int
    stop: int
    fraction_bits: int


class Block(NamedTuple):
    """Up to BLOCK neighbouring ids of a shard.

    Attributes:
        base: global id of lane 0: a multiple of BLOCK where an 8-bit copy may be read, and of four
            everywhere, because four ids share a call of Philox.
        lane, count: the ids are those of `count` lanes from `lane` on.
        local: column of the shard of the first of them.
    """

    base: int
    lane: int
    count: int
    local: int


class Memory(NamedTuple):
    """Where a kernel leaves what it finds of R rows.

    Attributes:
        stored_rows: int64 [R], rows of the memory.
        raw, processed: fp32 [stored rows, V_local], logits before and after the controls, or upper
            ends of the latter; `processed` has no rows without controls, and `raw` has none where
            no logits are stored.
    """

    stored_rows: np.ndarray
    raw: np.ndarray = np.empty((0, 0), F32)
    processed: np.ndarray = np.empty((0, 0), F32)


@jit()
def put(logits, block, row):
    """Store a block in a row of memory. An assignment of slices takes a second to compile."""
    part, inside = row[block.local : block.local + block.count], logits[block.lane :]
    for k in range(block.count):
        part[k] = inside[k]


class TakenRows(NamedTuple):
    """The hidden states of some rows.

    Attributes:
        hidden: fp32 [R or more, D]: R = 1, or a multiple of ROWS with zeros after the rows.
        norms: float64 [R], the rows' norms, rounded up.
        quanta: float64 [R], powers of two; every number of a row is a multiple of its own.
        bf16: uint16 [R or more, D], the same numbers in bf16; no rows if there is one row, if bf16
            does not hold all numbers, or if D needs padding.
        tiles: uint32, all but the first ROWS of `bf16` as `tile_dots.tile_dots` takes them; empty
            where it is not called.
    """

    hidden: np.ndarray
    norms: np.ndarray
    quanta: np.ndarray
    bf16: np.ndarray
    tiles: np.ndarray


def weight_of(numbers: Tensor, first_id: int, start: int, stop: int) -> Weight:
    """Return a range of a weight, or of logits, [n, m] of any floating dtype."""
    num_rows, num_columns = numbers.shape
    stride = numbers.stride(0) if num_rows > 1 else num_columns
    length = (num_rows - 1) * stride + num_columns if numbers.numel() else 0
    flat = array_of(numbers.as_strided((length,), (1,)))
    return Weight(flat, stride, first_id, start, stop, FORMATS[numbers.dtype].fraction_bits)


@jit()
def blocks_of(weight):
    """Return the number of blocks of a range."""
    begin, end = weight.first_id + weight.start, weight.first_id + weight.stop
    if end <= begin:
        return 0
    return -(-(end - (begin & ~(BLOCK - 1))) // BLOCK)


@jit()
def block_at(weight, n):
    """Return the n-th block of a range."""
    begin, end = weight.first_id + weight.start, weight.first_id + weight.stop
    base = (begin & ~(BLOCK - 1)) + n * BLOCK
    first = larger(base, begin)
    return Block(base, first - base, smaller(base + BLOCK, end) - first, first - weight.first_id)


@jit(allocates=True)
def part_of(weight, start, stop):
    """Return a part of a range."""
    numbers, stride, bits = weight.numbers, weight.stride, weight.fraction_bits
    return Weight(numbers, stride, weight.first_id, start, stop, bits)


@jit()
def aligned_block(first_id, column, num_ids):
    """Return the block whose lane 0 is a column, maybe before the shard; first_id + column is a
    multiple of four."""
    begin, end = larger(column, 0), smaller(column + BLOCK, num_ids)
    return Block(first_id + column, begin - column, end - begin, begin)


@jit()
def lanes_of(block):
    """Return the lanes of a block as bits of uint64."""
    return (~U64(0) >> U64(BLOCK - block.count)) << U64(block.lane)


@jit()
def leave_out(values, block):
    """Let no lane outside of a block have the largest of its values, fp32 [BLOCK]."""
    if block.count < BLOCK:
        values[: block.lane], values[block.lane + block.count :] = -np.inf, -np.inf


@jit(allocates=True)
def take_rows(hidden, index):
    """Return `TakenRows` of rows int64 [R] of the hidden states [B, D], which `as_fp32` reads."""
    num_rows, size = len(index), hidden.shape[1]
    out = np.empty((num_rows if num_rows == 1 else -(-num_rows // ROWS) * ROWS, size), F32)
    bf16 = aligned_zeros((len(out) if num_rows > 1 and size % PADDING == 0 else 0, size), U16)
    norms, quanta, more = np.empty(num_rows, F64), np.empty(num_rows, F64), U32(0)
    for i in range(num_rows):
        row, squares, low = hidden[index[i]], 0.0, U32(0)
        for d in range(size):
            number = F32(as_fp32(row[d]))
            bits = bits_as(number, U32)
            low |= bits & U32(0xFFFF)
            squares += F64(number) * F64(number)
            out[i, d] = number
            if len(bf16):
                bf16[i, d] = bits >> U32(16)
        norms[i] = math.sqrt(squares) * (1.0 + 2.0**-30)
        least, _ = least_and_largest(row, U64(0), U64(0), size)
        quanta[i] = quantum_of(least, 23 if low & U32(0x1FFF) else 10 if low else 7)
        more |= low
    for i in range(num_rows, len(out)):
        for d in range(size):
            out[i, d] = 0
            if len(bf16):
                bf16[i, d] = 0
    bf16 = bf16[:0] if more else bf16
    return TakenRows(out, norms, quanta, bf16, tiles_of(bf16))


@jit(allocates=True)
def aligned_zeros(shape, dtype):
    """Return zeros that begin at a line of memory; a vector that crosses two lines takes longer."""
    count = 1
    for size in shape:
        count *= size
    memory = np.zeros(count + LINE, dtype)
    begin = -memory.ctypes.data % LINE // memory.itemsize
    return memory[begin : begin + count].reshape(shape)


@jit(allocates=True)
def tiles_of(bf16):
    """Return the `tiles` of `TakenRows`."""
    used = len(bf16) > ROWS and may_use_tiles()
    count = -(-(len(bf16) - ROWS) // TILE) if used else 0
    tiles = aligned_zeros((count, bf16.shape[1] // PADDING, TILE, TILE), U32)
    for row in range(ROWS, len(bf16) if used else 0):
        tile, line = divmod(row - ROWS, TILE)
        for pair in range(bf16.shape[1] // 2):
            low, high = U32(bf16[row, 2 * pair]), U32(bf16[row, 2 * pair + 1])
            tiles[tile, pair // TILE, pair % TILE, line] = low | high << U32(16)
    return tiles
