"""Instructions on matrices: ldmatrix, stmatrix, mma.sync, and wgmma of warp groups (sm_90).

A sum of products is exact, in float64, and rounded once per instruction; tensor cores truncate, by
rules that are not public (`Options.truncate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compiled.emulator.shared_memory import SharedMemory
from tests.compiled.emulator.threads import Where

ROW, PAIR = np.arange(32) // 4, np.arange(32) % 4
"""Of a lane: its row in a fragment of 8 rows, and its place among the four lanes of a row."""
_SIZES = {"bf16": 2, "f16": 2, "s8": 1}


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of registers or of memory, exact, along the last axis."""
    bits = np.ascontiguousarray(bits)
    if kind == "s8":
        found = bits.view(np.int8)
    elif kind == "bf16":
        found = (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        found = bits.view(np.float16)
    return found.astype(np.float64)


@dataclass
class _Product:
    """An asynchronous product of warp groups, not yet in its registers."""

    index: np.ndarray
    group: int
    shape: str
    kind: str
    d: list[np.ndarray]
    a: Any
    b: np.ndarray
    keep: np.ndarray
    rest: list[int]
    at: int


class Matrices(SharedMemory):
    """Products of warps and warp groups."""

    def begin_products(self) -> None:
        self.products: list[_Product] = []
        self.product_group = np.zeros(self.total, np.int64)

    def _sum(self, c: np.ndarray, product: np.ndarray, out: Any) -> np.ndarray:
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
        self, where: Where, registers: list, address: np.ndarray, trans: bool, at: int
    ) -> None:
        rows = self.warps(where, at)
        address = np.broadcast_to(address, (rows.size,)).reshape(rows.shape)
        for k, register in enumerate(registers):
            lanes, own = rows[:, 8 * k : 8 * k + 8].ravel(), address[:, 8 * k : 8 * k + 8].ravel()
            words = np.ascontiguousarray(self.load_shared(lanes, own, 4, 4, at))
            tile = words.view(np.uint16).reshape(len(rows), 8, 8)
            tile = tile.transpose(0, 2, 1) if trans else tile
            low, high = tile[:, ROW, 2 * PAIR], tile[:, ROW, 2 * PAIR + 1].astype(np.uint32)
            register[rows.ravel()] = (low | (high << np.uint32(16))).ravel()

    def store_matrix(
        self, where: Where, registers: list, address: np.ndarray, trans: bool, at: int
    ) -> None:
        rows = self.warps(where, at)
        address = np.broadcast_to(address, (rows.size,)).reshape(rows.shape)
        for k, register in enumerate(registers):
            tile = np.empty((len(rows), 8, 8), np.uint16)
            tile[:, ROW, 2 * PAIR] = register[rows] & np.uint32(0xFFFF)
            tile[:, ROW, 2 * PAIR + 1] = register[rows] >> np.uint32(16)
            tile = tile.transpose(0, 2, 1) if trans else tile
            words = np.ascontiguousarray(tile).view(np.uint32).reshape(-1, 4)
            lanes, own = rows[:, 8 * k : 8 * k + 8].ravel(), address[:, 8 * k : 8 * k + 8].ravel()
            self.store_shared(lanes, own, 4, [words[:, j] for j in range(4)], at)

    def mma(
        self, where: Where, shape: str, kind: str, d: list, ra: list, rb: list, c: list, at: int
    ) -> None:
        """D = A · B + C of m16n8, by fragments of 32 lanes."""
        rows = self.warps(where, at)
        per, count, depth = 4 // _SIZES[kind], len(rows), int(shape.split("k")[1])
        assert shape.startswith("m16n8k") and depth == 4 * per * len(rb), shape
        a, b = np.empty((count, 16, depth)), np.empty((count, depth, 8))
        inside = per * PAIR[:, None] + np.arange(per)
        for k, register in enumerate(ra):
            numbers = decode(register[rows][..., None], kind)
            a[:, (ROW + 8 * (k & 1))[:, None], inside + 4 * per * (k >> 1)] = numbers
        for k, register in enumerate(rb):
            b[:, inside + 4 * per * k, ROW[:, None]] = decode(register[rows][..., None], kind)
        before = np.empty((count, 16, 8), np.float64)
        for k, register in enumerate(c):
            before[:, ROW + 8 * (k >> 1), 2 * PAIR + (k & 1)] = register[rows]
        found = self._sum(before, a @ b, d[0].dtype)
        for k, register in enumerate(d):
            register[rows.ravel()] = found[:, ROW + 8 * (k >> 1), 2 * PAIR + (k & 1)].ravel()

    def wgmma(
        self, where: Where, shape: str, kind: str, d: list, a: Any, b: np.ndarray, keep: Any,
        rest: list[int], at: int,
    ) -> None:  # fmt: skip
        """Issue a product, which reads registers and memory until it is waited for."""
        index = self.warps(where, at).ravel()
        if len(index) % 128 or (index[::128] % 128).any():
            self.fault(where, at, "a part of a warp group")
        descriptors = [
            each[index].reshape(-1, 128) for each in (a, b) if not isinstance(each, list)
        ]
        if any((each != each[:, :1]).any() for each in descriptors):
            self.fault(where, at, "a descriptor differs within a warp group")
        left = a if isinstance(a, list) else descriptors[0][:, 0]
        kept = np.broadcast_to(keep, (len(index),)).reshape(-1, 128)[:, :1]
        group = int(self.product_group[index[0]])
        product = _Product(
            index, group, shape, kind, d, left, descriptors[-1][:, 0], kept, rest, at
        )
        if self.options.late:
            self.products.append(product)
        else:
            self._multiply(product)

    def commit_products(self, where: Where) -> None:
        self.product_group[where] += 1

    def wait_for_products(self, where: Where, left: int, at: int) -> None:
        """Let the products of these threads take effect, but for their last `left` groups."""
        active, kept = np.zeros(self.total, bool), []
        active[where] = True
        for product in self.products:
            own = active[product.index]
            if own.any() and not own.all():
                self.fault(where, at, "warp groups that multiplied together wait apart")
            if own.any() and product.group < self.product_group[product.index[0]] - left:
                self._multiply(product)
            else:
                kept.append(product)
        self.products = kept

    def _multiply(self, product: _Product) -> None:
        index, size = product.index, _SIZES[product.kind]
        depth, columns = 32 // size, int(product.shape.split("n")[1].split("k")[0])
        assert len(product.d) * 2 == columns, product.shape
        signs, trans = ([1, 1], []) if size == 1 else (product.rest[:2], product.rest[2:])
        assert signs == [1, 1], product.rest
        groups = len(index) // 128
        if isinstance(product.a, list):
            lanes, per = index.reshape(groups, 4, 32), 4 // size
            left = np.empty((groups, 4, 16, depth))
            inside = per * PAIR[:, None] + np.arange(per)
            for k, register in enumerate(product.a):
                numbers = decode(register[lanes][..., None], product.kind)
                left[:, :, (ROW + 8 * (k & 1))[:, None], inside + 4 * per * (k >> 1)] = numbers
            left = left.reshape(groups, 64, depth)
        else:
            left = self._operand(product, product.a, 64, bool(trans and trans.pop(0)))
        right = self._operand(product, product.b, columns, bool(trans and trans[-1]))
        # Registers are [column / 8, row / 8 % 2, column % 2], lanes [group, warp, row % 8, rest].
        values = np.stack([register[index] for register in product.d])
        split = values.reshape(columns // 8, 2, 2, groups, 4, 8, 4)
        c = split.transpose(3, 4, 1, 5, 0, 6, 2).reshape(groups, 64, columns)
        c = np.where(product.keep[:, :, None], c.astype(np.float64), 0.0)
        found = self._sum(c, left @ right.transpose(0, 2, 1), values.dtype)
        back = found.reshape(groups, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        for register, value in zip(product.d, back.reshape(columns // 2, -1), strict=True):
            register[index] = value

    def _operand(
        self, product: _Product, descriptor: np.ndarray, rows: int, trans: bool
    ) -> np.ndarray:
        """Return a [groups, rows, 32 / size] operand in shared memory, by its descriptor."""

        def field(low: int, bits: int) -> np.ndarray:
            found = (descriptor >> np.uint64(low)) & np.uint64((1 << bits) - 1)
            return found.astype(np.int64)[:, None, None]

        start, leading, stride = (16 * field(low, 14) for low in (0, 16, 32))
        mode, size = int(field(62, 2)[0, 0, 0]), _SIZES[product.kind]
        if field(49, 3).any() or (trans and mode == 0):
            raise NotImplementedError("this descriptor of shared memory")
        pitch = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
        r, k = np.arange(rows)[:, None], np.arange(32 // size)[None, :]
        byte, wide = k * size, pitch // size
        if trans:
            column = (r % wide) * size
            inside = (r // wide) * leading + (k // 8) * stride + (k % 8) * pitch + column
        elif mode == 0:
            inside = (r // 8) * stride + (r % 8) * 16 + (byte // 16) * leading + byte % 16
        else:
            inside = (r // 8) * stride + (r % 8) * pitch + byte
        address = start + inside
        if mode:
            address ^= ((address >> 7) & {1: 7, 2: 3, 3: 1}[mode]) << 4
        bits = self.operand_bits(product.index[::128], address, size, product.at)
        return decode(bits, product.kind)
