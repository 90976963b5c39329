"""Accesses of global memory: bounds, alignment, atomics, early launches, prefetches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.compiled.emulator import regions
from tests.compiled.emulator.regions import GlobalMemory, OutOfBounds, Region
from tests.compiled.emulator.store_buffers import ATOMICS, StoreBuffers, perform
from tests.compiled.emulator.threads import Threads, Where


class Accesses(Threads):
    """Global memory as threads reach it.

    Attributes:
        early: of each thread, whether the launch before may still run.
        unused: places of atomics whose result no instruction reads.
    """

    memory: GlobalMemory
    buffers: StoreBuffers | None
    early: np.ndarray
    started_next = False
    random: np.random.Generator | None
    unused: frozenset[int]

    def _regions(
        self, where: Where, address: np.ndarray, width: int, at: int
    ) -> list[tuple[Region, Any]]:
        odd = address % np.uint64(width) != 0
        if odd.any():
            place = int(np.flatnonzero(odd)[0])
            what = f"the address {int(address[place]):#x} is no multiple of {width}"
            self.fault(where, at, what, place)
        try:
            found = self.memory.of(address, width)
        except OutOfBounds as error:
            place = error.args[0]
            near = self.memory.nearest(int(address[place]), width)
            self.fault(where, at, f"{width} bytes, which {near}", place)
        if self.options.count:
            self._count(where, address, width, at, found)
        return found

    def _count(self, where: Where, address: np.ndarray, width: int, at: int, parts: list) -> None:
        warps = (self.index(where) // 32).astype(np.uint64) << np.uint64(44)
        for region, chosen in parts:
            sectors = np.unique(warps[chosen] | (address[chosen] >> np.uint64(5)))
            threads = len(address[chosen])
            name = self.instructions[at].name
            self.report.accesses[name, region.name] += (threads, threads * width, len(sectors))
            if name.startswith(("ld", "cp.async.c")):
                if region.reads is None:
                    region.reads = np.zeros(-(-region.size // 4), np.int64)
                first = (address[chosen] - np.uint64(region.start)).astype(np.int64) // 4
                for more in range(max(1, width // 4)):
                    np.add.at(region.reads, first + more, 1)

    def _parts(self, where: Where, address: np.ndarray, width: int, at: int, writes: bool) -> Any:
        """Yield the accesses by region: it, which they are, their threads, their first bytes."""
        index = self.index(where)
        if self.buffers is not None:
            programs = self.grid_program[index]
            self.buffers.show_own(programs, address, width)
        for region, chosen in self._regions(where, address, width, at):
            first = (address[chosen] - np.uint64(region.start)).astype(np.int64)
            own, cells = index[chosen], first // 4
            if width > 4:
                cells = cells[:, None] + np.arange(width // 4)
            region.marks[cells] |= regions.WRITE if writes else regions.READ
            early = self.early[own]
            if early.any():
                mark = regions.EARLY_WRITE if writes else regions.EARLY_READ
                region.marks[cells[early]] |= mark
            yield region, chosen, own, first

    def load_global(
        self, where: Where, address: np.ndarray, size: int, count: int, at: int
    ) -> np.ndarray:
        """Return numbers of `size` bytes, [threads, count]."""
        found = np.empty((len(address), count), f"u{size}")
        for region, chosen, _, first in self._parts(where, address, size * count, at, False):
            found[chosen] = region.view(size)[(first // size)[:, None] + np.arange(count)]
        return found

    def store_global(
        self, where: Where, address: np.ndarray, size: int, values: list, at: int
    ) -> None:
        width = size * len(values)
        for region, chosen, own, first in self._parts(where, address, width, at, True):
            if not region.given:
                self.report.far_stores[self.name, self.instructions[at].name] += len(own)
            view = region.view(size)
            for k, value in enumerate(values):
                stored = np.broadcast_to(value, address.shape)[chosen].astype(view.dtype)
                places = first // size + k
                if self.buffers is not None:
                    self._hold(region, view.dtype, "store", own, places, stored)
                    continue
                view[places] = stored
                if (view[places] != stored).any():
                    self.doubt(at, f"threads store different values at one place of {region.name}")

    def atomic(
        self, where: Where, name: str, order: str, scope: str, address: np.ndarray, type_name: str,
        value: Any, at: int,
    ) -> np.ndarray:  # fmt: skip
        """Perform atomics one after another; return what was there before each."""
        dtype = np.dtype(
            {"s": "i", "u": "u", "b": "u"}[type_name[0]] + str(int(type_name[1:]) // 8)
        )
        if self.buffers is not None and order in ("release", "acq_rel"):
            own = self.index(where)
            epochs = self.epoch[self.program[own]]
            self.buffers.release(self.grid_program[own], self._thread_ids(own), epochs)
        old = np.zeros(len(address), dtype)
        values = np.broadcast_to(np.asarray(value, dtype), address.shape)
        for region, chosen, own, first in self._parts(where, address, dtype.itemsize, at, True):
            if scope == "cta":
                self._own_cells(region, own, first, at)
            places, given = first // dtype.itemsize, values[chosen]
            if self.buffers is not None and order == "relaxed" and at in self.unused:
                self._hold(region, dtype, name, own, places, given)
                continue
            turn = np.arange(len(own))
            if self.random is not None:
                turn = self.random.permutation(turn)
            memory = region.view(dtype.itemsize).view(dtype)
            before = np.empty(len(own), dtype)
            before[turn] = perform(memory, places[turn], given[turn], ATOMICS.index(name))
            old[chosen] = before
        return old

    def _thread_ids(self, index: np.ndarray) -> np.ndarray:
        return self.grid_program[index] * self.threads + self.tid_x[index]

    def _hold(
        self, region: Region, dtype: np.dtype, how: str, own: np.ndarray, places: np.ndarray,
        values: np.ndarray,
    ) -> None:  # fmt: skip
        assert self.buffers is not None
        programs, epochs = self.grid_program[own], self.epoch[self.program[own]]
        threads = self._thread_ids(own)
        self.buffers.hold(region, dtype, how, programs, threads, epochs, places, values)

    def _own_cells(self, region: Region, own: np.ndarray, first: np.ndarray, at: int) -> None:
        """Atomics of scope .cta are none towards other programs."""
        if region.owners is None:
            region.owners = np.full(len(region.marks), -1, np.int64)
        programs, cells = self.grid_program[own], first // 4
        before = region.owners[cells]
        region.owners[cells] = programs
        if ((before >= 0) & (before != programs)).any() or (region.owners[cells] != programs).any():
            self.doubt(
                at, f"atomics of scope .cta of several programs at one place of {region.name}"
            )

    def wait_for_launch(self, where: Where) -> None:
        self.early[where] = False

    def let_next_start(self, where: Where) -> None:
        self.started_next = True

    def prefetch(self, where: Where, address: np.ndarray, size: Any, at: int) -> None:
        """Check a bulk prefetch, and count it as bytes asked for."""
        sizes = np.broadcast_to(size, address.shape)
        odd = (address % np.uint64(16) != 0) | (sizes % 16 != 0)
        if odd.any():
            self.fault(where, at, "a prefetch of no multiple of 16", int(np.flatnonzero(odd)[0]))
        for each in np.unique(sizes):
            own = np.flatnonzero(sizes == each)
            if each == 0:
                self.doubt(at, "prefetches nothing")
                continue
            try:
                parts = self.memory.of(address[own], int(each))
            except OutOfBounds as error:
                near = self.memory.nearest(int(address[own][error.args[0]]), int(each))
                self.doubt(at, f"prefetches {each} bytes, and {near}")
                continue
            if self.options.count:
                self._count(self.index(where)[own], address[own], int(each), at, parts)
