"""Instructions on matrices: ldmatrix, stmatrix, mma.sync, and wgmma of warp groups (sm_90).

A sum of products is exact, in float64, and rounded once per instruction; tensor cores truncate, by
rules that are not public (`Options.truncate`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.compiled.emulator.arithmetic import from_bfloat
from tests.compiled.emulator.shared_memory import SharedMemory
from tests.compiled.emulator.threads import Where

_ROW, _PAIR = np.arange(32) // 4, np.arange(32) % 4
"""Of a lane: its row in a fragment of 8 rows, and its place among the four lanes of a row."""
SIZES = {"bf16": 2, "f16": 2, "s8": 1}


def _decoded(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of registers or of memory, exact, along the last axis."""
    found = np.ascontiguousarray(bits).view({2: np.uint16, 1: np.int8}[SIZES[kind]])
    if kind == "bf16":
        found = from_bfloat(found)
    return (found.view(np.float16) if kind == "f16" else found).astype(np.float64)


def _left_fragment(registers: list, lanes: np.ndarray, kind: str) -> np.ndarray:
    """Return [warps, 16, depth] of registers that hold two halves of 8 rows, by turns."""
    per = 4 // SIZES[kind]
    found = np.empty((len(lanes), 16, 2 * per * len(registers)))
    inside = per * _PAIR[:, None] + np.arange(per)
    for k, register in enumerate(registers):
        rows, columns = (_ROW + 8 * (k & 1))[:, None], inside + 4 * per * (k >> 1)
        found[:, rows, columns] = _decoded(register[lanes][..., None], kind)
    return found


def _right_fragment(registers: list, lanes: np.ndarray, kind: str) -> np.ndarray:
    """Return [warps, depth, 8]."""
    parts = [_decoded(register[lanes][..., None], kind) for register in registers]
    rows = [part.reshape(len(lanes), 8, -1) for part in parts]
    return np.concatenate(rows, axis=2).transpose(0, 2, 1)


class Matrices(SharedMemory):
    """Products of warps and warp groups."""

    def sum_of(self, c: np.ndarray, product: np.ndarray, out: Any) -> np.ndarray:
        """Return c + product as the accumulator's type."""
        total = c.astype(np.float64) + product
        if out == np.int32:
            return np.clip(total, -(2.0**31), 2.0**31 - 1).astype(np.int64).astype(np.int32)
        found = total.astype(np.float32)
        if self.options.truncate:
            above = np.abs(found.astype(np.float64)) > np.abs(total)
            found = np.where(above, np.nextafter(found, np.float32(0)), found)
        return found

    def load_matrix(
        self, where: Where, registers: list, address: np.ndarray, trans: str | None, at: int
    ) -> None:
        rows = self.warps(where, at)
        address = self.each(where, address).reshape(rows.shape)
        for k, register in enumerate(registers):
            eight = slice(8 * k, 8 * k + 8)
            words = self.load_shared(rows[:, eight].ravel(), address[:, eight].ravel(), 4, 4, at)
            tile = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)
            tile = np.ascontiguousarray(tile.swapaxes(1, 2) if trans else tile)
            register[rows] = tile.view(np.uint32).reshape(rows.shape)

    def store_matrix(
        self, where: Where, registers: list, address: np.ndarray, trans: str | None, at: int
    ) -> None:
        rows = self.warps(where, at)
        address = self.each(where, address).reshape(rows.shape)
        for k, register in enumerate(registers):
            eight = slice(8 * k, 8 * k + 8)
            tile = register[rows].view(np.uint16).reshape(-1, 8, 8)
            tile = np.ascontiguousarray(tile.swapaxes(1, 2) if trans else tile)
            words = list(tile.view(np.uint32).reshape(-1, 4).T)
            self.store_shared(rows[:, eight].ravel(), address[:, eight].ravel(), 4, words, at)

    def mma(
        self, where: Where, depth: int, kind: str, d: list, a: list, b: list, c: list, at: int
    ) -> None:
        """D = A · B + C of m16n8, by fragments of 32 lanes."""
        lanes = self.warps(where, at)
        assert depth == 16 // SIZES[kind] * len(b)
        product = _left_fragment(a, lanes, kind) @ _right_fragment(b, lanes, kind)
        places = [(_ROW + 8 * (k >> 1), 2 * _PAIR + (k & 1)) for k in range(4)]
        found = [
            self.sum_of(register[lanes], product[:, rows, columns], register.dtype)
            for register, (rows, columns) in zip(c, places, strict=True)
        ]
        for register, value in zip(d, found, strict=True):
            register[lanes] = value

    def wgmma(
        self, where: Where, columns: int, kind: str, d: list, a: np.ndarray, b: np.ndarray,
        keep: Any, rest: list[int], at: int,
    ) -> None:  # fmt: skip
        """Issue a product, which reads registers and memory until it is waited for."""
        index = self.warps(where, at).ravel()
        if len(index) % 128 or (index[::128] % 128).any():
            self.fault(where, at, "a part of a warp group")
        groups = index.reshape(-1, 128)
        if rest != ([1, 1, 0, 0] if SIZES[kind] == 2 else []):
            raise NotImplementedError(f"a product of {rest}")
        assert len(d) * 2 == columns
        left, right = (each[groups] for each in (a, b))
        if ((left != left[:, :1]) | (right != right[:, :1])).any():
            self.fault(where, at, "a descriptor differs within a warp group")
        kept = self.each(where, keep).reshape(groups.shape)[:, :1, None]

        def effect(own: np.ndarray) -> None:
            if len(own) < len(index):
                self.fault(where, at, "warp groups that multiplied together wait apart")
            readers = groups[:, 0]
            rows = self.operand(readers, left[:, 0], 64, kind, at)
            others = self.operand(readers, right[:, 0], columns, kind, at)
            # Registers: [column / 8, row / 8 % 2, column % 2], lanes: [group, warp, row % 8, rest].
            values = np.stack([register[index] for register in d])
            split = values.reshape(columns // 8, 2, 2, len(groups), 4, 8, 4)
            c = split.transpose(3, 4, 1, 5, 0, 6, 2).reshape(len(groups), 64, columns)
            c = np.where(kept, c.astype(np.float64), 0.0)
            found = self.sum_of(c, rows @ others.transpose(0, 2, 1), values.dtype)
            back = found.reshape(len(groups), 4, 2, 8, columns // 8, 4, 2)
            back = back.transpose(4, 2, 6, 0, 1, 3, 5).reshape(columns // 2, -1)
            for register, value in zip(d, back, strict=True):
                register[index] = value

        self.later("products", index, effect)

    def operand(
        self, readers: np.ndarray, descriptor: np.ndarray, rows: int, kind: str, at: int,
        marks: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Return a [products, rows, 32 / size] operand in shared memory, by its descriptor."""

        def field(low: int, bits: int) -> np.ndarray:
            found = (descriptor >> np.uint64(low)) & np.uint64((1 << bits) - 1)
            return found.astype(np.int64)[:, None, None]

        start, stride, mode, size = field(0, 14), field(32, 14), field(62, 2)[0, 0, 0], SIZES[kind]
        if field(49, 3).any() or (field(62, 2) != mode).any() or mode == 0:
            raise NotImplementedError("this descriptor of shared memory")
        r, byte = np.arange(rows)[:, None], np.arange(0, 32, size)[None, :]
        pitch, bits = {1: (128, 7), 2: (64, 3), 3: (32, 1)}[int(mode)]
        address = 16 * start + (r // 8) * 16 * stride + (r % 8) * pitch + byte
        address ^= ((address >> 7) & bits) << 4
        return _decoded(self.operand_bits(readers, address, size, at, marks), kind)
