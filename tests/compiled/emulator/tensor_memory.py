"""Tensor memory and the products into it (sm_100), and the mbarriers that tell when they are over.

A product takes effect when a thread waits for the mbarrier at which it arrives, so neither a sum
that is read too soon nor an operand that is overwritten too soon goes unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
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
    """128 lanes of 512 words, of which a program has the columns that it allocated."""

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self._allocated = defaultdict[int, list[range]](list)
        self._barriers: dict[tuple[int, int], _Barrier] = {}

    @cached_property
    def _tensor(self) -> np.ndarray:
        return np.zeros((self.count, _LANES, _COLUMNS), np.uint32)

    @cached_property
    def _filled(self) -> np.ndarray:
        return np.zeros(self._tensor.shape, bool)

    def allocate(self, where: Where, address: Any, columns: int, at: int) -> None:
        first = self.warps(where, at)[:, 0]
        own, base = self._allocated, np.zeros(len(first), np.uint32)
        for k, program in enumerate(self.program[first].tolist()):
            base[k] = start = _COLUMNS - columns - sum(map(len, own[program]))
            if start < 0 or columns not in (32, 64, 128, 256, 512):
                self.fault(first, at, "so many columns of tensor memory are not free", k)
            own[program].append(range(start, start + columns))
        to = self.each(where, address)[::32]
        self.store_shared(first, to, 4, [base], at)

    def free(self, where: Where, base: Any, columns: int, at: int) -> None:
        first = self.warps(where, at)[:, 0]
        starts = self.each(where, base)[::32].tolist()
        for k, program in enumerate(self.program[first].tolist()):
            given = range(starts[k], starts[k] + columns)
            if given not in self._allocated[program]:
                self.fault(first, at, "tensor memory that is not its own is given back", k)
            self._allocated[program].remove(given)

    def require_free(self) -> None:
        """Raise if tensor memory was not given back.

        Raises:
            Fault: that is so, and a later program may wait for it forever.
        """
        if any(self._allocated.values()):
            raise Fault(f"{self.name}: tensor memory is not given back")

    def _cells(
        self, where: Where, address: Any, count: int, half: int | None, at: int
    ) -> tuple[np.ndarray, ...]:
        """Return program, lane and columns of the words of each thread."""
        index = self.warps(where, at).ravel()
        address = self.each(where, address).astype(np.int64)
        lane, inside = address >> 16, index % 32
        self.fault_if(lane != 32 * (self.warp[index] % 4), where, at, "lanes of another warp")
        column = (address & 0xFFFF)[:, None] + np.arange(count)
        if half is not None:
            column, inside = column + half * (inside[:, None] // 16), inside % 16
        self._check(self.program[index], column, at)
        return self.program[index][:, None], (lane + inside)[:, None], column

    def _check(self, programs: np.ndarray, columns: np.ndarray, at: int) -> None:
        for program in np.unique(programs).tolist():
            used = set(np.unique(columns[programs == program]).tolist())
            if used.difference(*self._allocated[program]):
                self.fault(
                    np.flatnonzero(self.program == program), at, "tensor memory of others", 0
                )

    def load_tensor(
        self, where: Where, registers: list, address: Any, half: int | None, at: int
    ) -> None:
        index, cells = self.index(where), self._cells(where, address, len(registers), half, at)

        def effect(own: np.ndarray) -> None:
            of = tuple(np.broadcast_to(each, cells[2].shape)[own] for each in cells)
            if not self._filled[of].all():
                self.doubt(at, "reads tensor memory that nobody wrote")
            for register, values in zip(registers, self._tensor[of].T, strict=True):
                register[index[own]] = values

        self.later("tensor loads", index, effect)

    def store_tensor(
        self, where: Where, registers: list, address: Any, half: int | None, at: int
    ) -> None:
        index, cells = self.index(where), self._cells(where, address, len(registers), half, at)
        values = np.stack([register[index] for register in registers], axis=1)

        def effect(own: np.ndarray) -> None:
            of = tuple(np.broadcast_to(each, cells[2].shape)[own] for each in cells)
            self._tensor[of], self._filled[of] = values[own], True

        self.later("tensor stores", index, effect)

    def settle(self, where: Where, kind: str, at: int) -> None:
        """Wait for all loads or stores of these threads."""
        self.warps(where, at)
        self.commit(where, kind)
        self.wait_for(where, kind, 0, at)

    def tensor_product(
        self,
        where: Where,
        address: Any,
        a: np.ndarray,
        b: np.ndarray,
        form: Any,
        keep: Any,
        at: int,
    ) -> None:
        """D = A · B + D, with D in tensor memory, and the others described in shared memory."""
        index = self.index(where)
        programs = self._one_each(index, at)
        column, kept = (self.each(where, x).astype(np.int64) for x in (address, keep))
        bits = int(self.each(where, form)[0])
        kind, out, others = ("f16", "bf16")[bits >> 7 & 7], bits >> 4 & 3, bits & 0xE000600F
        if np.any(form != bits) or out != 1 or others or bits >> 10 & 7 != bits >> 7 & 7:
            raise NotImplementedError(f"a product of form {bits:#x}")
        height, width = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
        rows, columns = np.arange(height), column[:, None] + np.arange(width)
        lanes = rows if height == _LANES else rows // 16 * 32 + rows % 16
        assert height in (64, _LANES), height
        self._check(programs, columns, at)

        def effect(own: np.ndarray) -> None:
            readers = index[own]
            left = self.operand(readers, a[own], height, kind, bool(bits >> 15 & 1), at, False)
            right = self.operand(readers, b[own], width, kind, bool(bits >> 16 & 1), at, False)
            of = programs[own, None, None], lanes[:, None], columns[own, None, :]
            keep = kept[own, None, None]
            if not (self._filled[of] | (keep == 0)).all():
                self.doubt(at, "adds to tensor memory that nobody wrote")
            c = np.where(keep, self._tensor[of].view(np.float32).astype(np.float64), 0.0)
            found = self.sum_of(c, left @ right.transpose(0, 2, 1), np.float32)
            self._tensor[of], self._filled[of] = found.view(np.uint32), True

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
