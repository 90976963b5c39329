"""Tensor memory and the products into it (sm_100), and the mbarriers that tell when they are over.

A product takes effect when a thread waits for the mbarrier at which it arrives. So neither a sum
that is read too soon nor an operand that is overwritten too soon goes unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tests.compiled.emulator.matrices import Matrices
from tests.compiled.emulator.report import Fault
from tests.compiled.emulator.threads import Launch, Where

_LANES, _COLUMNS = 128, 512


@dataclass
class _Barrier:
    """How many phases are over, and arrivals to come: a thread, and the groups before it."""

    phase: int = 0
    arrivals: list[tuple[int, int]] = field(default_factory=list)


class TensorMemory(Matrices):
    """128 lanes of 512 words. A program has the columns that it allocated."""

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self._owned = np.zeros((self.count, _COLUMNS), bool)
        self._barriers: dict[tuple[int, int], _Barrier] = {}

    @cached_property
    def _tensor(self) -> np.ndarray:
        return np.zeros(self.count * _LANES * _COLUMNS, np.uint32)

    @cached_property
    def _filled(self) -> np.ndarray:
        return np.zeros(len(self._tensor), bool)

    def allocate(self, where: Where, address: Any, columns: int, at: int) -> None:
        first = self.warps(where, at)[:, 0]
        base = _COLUMNS - columns - self._owned[self.program[first]].sum(axis=1)
        self.fault_if(base < 0, first, at, "so many columns of tensor memory are not free")
        self._owned[self.program[first, None], base[:, None] + np.arange(columns)] = True
        self.store_shared(first, self.each(where, address)[::32], 4, [base.astype(np.uint32)], at)

    def free(self, where: Where, base: Any, columns: int, at: int) -> None:
        first = self.warps(where, at)[:, 0]
        given = self.each(where, base)[::32, None].astype(np.int64) + np.arange(columns)
        self._cells(first, 0, given, at)
        self._owned[self.program[first, None], given] = False

    def require_free(self) -> None:
        """Raise if tensor memory was not given back.

        Raises:
            Fault: that is so, and a later program may wait for it forever.
        """
        if self._owned.any():
            raise Fault(f"{self.name}: tensor memory is not given back")

    def _cells(self, index: np.ndarray, lanes: Any, columns: np.ndarray, at: int) -> np.ndarray:
        """Return places in `_tensor`: of threads, lanes and columns, which must be its own."""
        program = self.program[index].reshape(-1, *[1] * (columns.ndim - 1))
        own = self._owned[program, columns % _COLUMNS] & (columns < _COLUMNS)
        bad = ~own.reshape(len(index), -1).all(axis=1)
        self.fault_if(bad, index, at, "tensor memory of others")
        return (program * _LANES + lanes) * _COLUMNS + columns

    def _words(self, where: Where, address: Any, count: int, half: int | None, at: int) -> Any:
        """Return the places of some words of each thread's lane, from its part of the warp on."""
        index = self.warps(where, at).ravel()
        address = self.each(where, address).astype(np.int64)
        lane, inside = address >> 16, index % 32
        self.fault_if(lane != 32 * (self.warp[index] % 4), where, at, "lanes of another warp")
        column = (address & 0xFFFF)[:, None] + np.arange(count)
        if half is not None:
            column, inside = column + half * (inside[:, None] // 16), inside % 16
        return self._cells(index, (lane + inside)[:, None], column, at)

    def _taken_words(self, cells: np.ndarray, at: int) -> np.ndarray:
        if not self._filled[cells].all():
            self.doubt(at, "reads tensor memory that nobody wrote")
        return self._tensor[cells]

    def load_tensor(
        self, where: Where, registers: list, address: Any, half: int | None, at: int
    ) -> None:
        index, cells = self.index(where), self._words(where, address, len(registers), half, at)

        def effect(own: np.ndarray) -> None:
            values = self._taken_words(cells[own], at)
            for register, value in zip(registers, values.T, strict=True):
                register[index[own]] = value

        self.later("tensor ld", index, effect)

    def store_tensor(
        self, where: Where, registers: list, address: Any, half: int | None, at: int
    ) -> None:
        index, cells = self.index(where), self._words(where, address, len(registers), half, at)
        values = np.stack([register[index] for register in registers], axis=1)

        def effect(own: np.ndarray) -> None:
            self._tensor[cells[own]], self._filled[cells[own]] = values[own], True

        self.later("tensor st", index, effect)

    def settle(self, where: Where, kind: str, at: int) -> None:
        """Wait for all loads or stores of these threads."""
        self.warps(where, at)
        self.commit(where, kind)
        self.wait_for(where, kind, 0, at)

    def tensor_product(
        self, where: Where, address: Any, a: np.ndarray, b: np.ndarray, form: Any, keep: Any,
        at: int,
    ) -> None:  # fmt: skip
        """D = A · B + D, with D in tensor memory, and the others described in shared memory."""
        index, bits = self.index(where), int(self.each(where, form)[0])
        self._one_each(index, at)
        kind, out, others = ("f16", "bf16")[bits >> 7 & 7], bits >> 4 & 3, bits & 0xE001E00F
        if np.any(form != bits) or out != 1 or others or bits >> 10 & 7 != bits >> 7 & 7:
            raise NotImplementedError(f"a product of form {bits:#x}")
        height, width = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
        assert height in (64, _LANES), height
        lanes = np.arange(height)
        lanes = (lanes if height == _LANES else lanes // 16 * 32 + lanes % 16)[:, None]
        columns = self.each(where, address).astype(np.int64)[:, None, None] + np.arange(width)
        cells, kept = self._cells(index, lanes, columns, at), self.each(where, keep)[:, None, None]

        def effect(own: np.ndarray) -> None:
            left = self.operand(index[own], a[own], height, kind, at, marks=False)
            right = self.operand(index[own], b[own], width, kind, at, marks=False)
            c = np.zeros(cells[own].shape)
            if kept[own].any():
                before = self._taken_words(cells[own], at).view(np.float32).astype(np.float64)
                c = np.where(kept[own], before, 0)
            found = self.sum_of(c, left @ right.transpose(0, 2, 1), np.float32)
            self._tensor[cells[own]], self._filled[cells[own]] = found.view(np.uint32), True

        self.later("tensor products", index, effect)

    def _one_each(self, index: np.ndarray, at: int) -> np.ndarray:
        """Return the programs of threads that are the only ones of theirs."""
        programs = self.program[index]
        if len(np.unique(programs)) < len(index):
            self.fault(index, at, "several threads of a program do what one must do")
        return programs

    def _mbarriers(self, where: Where, address: Any, at: int) -> list[tuple[int, int]]:
        """Return program and address of the mbarrier of each thread."""
        programs = self._one_each(self.index(where), at).tolist()
        return list(zip(programs, self.each(where, address).tolist(), strict=True))

    def _barrier(self, place: tuple[int, int], at: int) -> _Barrier:
        if place not in self._barriers:
            self.fault(np.flatnonzero(self.program == place[0]), at, "there is no mbarrier", 0)
        return self._barriers[place]

    def init_barrier(self, where: Where, address: Any, arrivals: int, at: int) -> None:
        if arrivals != 1:
            raise NotImplementedError(f"an mbarrier of {arrivals} arrivals")
        for place in self._mbarriers(where, address, at):
            if place in self._barriers:
                self.doubt(at, "an mbarrier in use begins anew")
            self._barriers[place] = _Barrier()

    def forget_barrier(self, where: Where, address: Any, at: int) -> None:
        for place in self._mbarriers(where, address, at):
            if self._barrier(place, at).arrivals:
                self.doubt(at, "an mbarrier goes that nobody waited for")
            del self._barriers[place]

    def arrive_after_products(self, where: Where, address: Any, at: int) -> None:
        self.commit(where, "tensor products")
        groups = self.groups["tensor products"][where].tolist()
        threads = zip(self.index(where).tolist(), groups, strict=True)
        for place, arrival in zip(self._mbarriers(where, address, at), threads, strict=True):
            self._barrier(place, at).arrivals.append(arrival)

    def try_wait(self, where: Where, address: Any, parity: Any, at: int) -> np.ndarray:
        """Return whether the phase of a parity is over, after the products that it stands for."""
        address, parity = (self.each(where, x).astype(np.int64) for x in (address, parity))
        keys = (self.program[self.index(where)] << 32 | address) << 1 | parity
        known, inverse = np.unique(keys, return_inverse=True)
        asked = [
            (self._barrier((key >> 33, key >> 1 & 0xFFFFFFFF), at), key & 1)
            for key in known.tolist()
        ]
        came = []
        for barrier, odd in asked:
            if barrier.phase & 1 == odd and barrier.arrivals:
                came.append(barrier.arrivals.pop(0))
                barrier.phase += 1
        if came:
            threads, groups = np.array(came).T
            kind = "tensor products"
            self.wait_for(threads, kind, self.groups[kind][threads] - groups, at)
        return np.array([barrier.phase & 1 != odd for barrier, odd in asked])[inverse]
