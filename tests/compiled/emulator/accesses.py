"""Accesses of global memory: bounds, alignment, atomics, early launches, prefetches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.compiled.emulator import regions
from tests.compiled.emulator.regions import OutOfBounds, Region
from tests.compiled.emulator.store_buffers import ATOMICS, Waiting, perform
from tests.compiled.emulator.threads import Launch, Threads, Where


class Accesses(Threads):
    """Global memory as threads reach it.

    Attributes:
        early: of each thread, whether the launch before may still run.
    """

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self.memory, self.buffers, order = launch.memory, launch.buffers, launch.options.order
        self.early = np.full(self.total, launch.early)
        self._random = None if order is None else np.random.default_rng(order)

    def _regions(
        self, where: Where, address: np.ndarray, width: int, at: int
    ) -> list[tuple[Region, Any]]:
        odd = address % np.uint64(width) != 0
        self.fault_if(odd, where, at, f"an address is no multiple of {width}")
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
            self.report.accesses[self.name, name, region.name] += (
                threads,
                threads * width,
                len(sectors),
            )
            if name.startswith(("ld", "cp.async.c")):
                first = region.offsets(address[chosen]) // 4
                for more in range(max(1, width // 4)):
                    np.add.at(region.reads, first + more, 1)

    def _parts(self, where: Where, address: np.ndarray, width: int, at: int, writes: bool) -> Any:
        """Yield the accesses by region: it, which they are, their threads, their first bytes."""
        index = self.index(where)
        if self.buffers is not None:
            self.buffers.show_own(self.grid_program[index], address, width)
        for region, chosen in self._regions(where, address, width, at):
            own, first = index[chosen], region.offsets(address[chosen])
            cells = (first // 4)[:, None] + np.arange(max(1, width // 4))
            region.marks[cells] |= regions.WRITE if writes else regions.READ
            if self.launch.early:
                mark = regions.EARLY_WRITE if writes else regions.EARLY_READ
                region.marks[cells[self.early[own]]] |= mark
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
        for region, chosen, own, first in self._parts(where, address, size * len(values), at, True):
            if not region.given:
                self.report.far_stores[self.name, self.instructions[at].name] += len(own)
            view = region.view(size)
            for k, value in enumerate(values):
                stored = self.each(where, value)[chosen].astype(view.dtype)
                places = first // size + k
                if self.buffers is not None:
                    self._hold(region, view, "store", own, places, stored)
                    continue
                view[places] = stored
                if (view[places] != stored).any():
                    self.doubt(at, f"threads store different values at one place of {region.name}")

    def atomic(
        self, where: Where, name: str, order: str, scope: str, address: np.ndarray, dtype: Any,
        value: Any, at: int,
    ) -> np.ndarray:  # fmt: skip
        """Perform atomics one after another; return what was there before each."""
        size = dtype().itemsize
        if self.buffers is not None and order in ("release", "acq_rel"):
            own = self.index(where)
            epochs = self.epoch[self.program[own]]
            self.buffers.release(self.grid_program[own], self._thread_ids(own), epochs)
        old = np.zeros(len(address), dtype)
        values = self.each(where, value).astype(dtype)
        for region, chosen, own, first in self._parts(where, address, size, at, True):
            if scope == "cta":
                self._own_cells(region, own, first, at)
            places, given, memory = first // size, values[chosen], region.view(size).view(dtype)
            unused = at in self.launch.translation.unused
            if self.buffers is not None and order == "relaxed" and unused:
                self._hold(region, memory, name, own, places, given.copy())
                continue
            turn = np.arange(len(own))
            if self._random is not None:
                turn = self._random.permutation(turn)
            before = np.empty(len(own), dtype)
            before[turn] = perform(memory, places[turn], given[turn], ATOMICS.index(name))
            old[chosen] = before
        return old

    def _thread_ids(self, index: np.ndarray) -> np.ndarray:
        return self.grid_program[index] * self.threads + index % self.threads

    def _hold(
        self, region: Region, memory: np.ndarray, how: str, own: np.ndarray, places: np.ndarray,
        values: np.ndarray,
    ) -> None:  # fmt: skip
        assert self.buffers is not None
        programs, epochs = self.grid_program[own], self.epoch[self.program[own]]
        held = (programs, self._thread_ids(own), epochs, places, values)
        self.buffers.waiting.append(Waiting(region, memory, how, *held))

    def _own_cells(self, region: Region, own: np.ndarray, first: np.ndarray, at: int) -> None:
        """Atomics of scope .cta are none towards other programs."""
        programs, cells = self.grid_program[own], first // 4
        before = region.owners[cells]
        region.owners[cells] = programs
        if ((before >= 0) & (before != programs)).any() or (region.owners[cells] != programs).any():
            told = f"atomics of scope .cta of several programs at one place of {region.name}"
            self.doubt(at, told)

    def wait_for_launch(self, where: Where) -> None:
        self.early[where] = False

    def let_next_start(self, where: Where) -> None:
        self.launch.next_started = True

    def prefetch(self, where: Where, address: np.ndarray, size: Any, at: int) -> None:
        """Check a bulk prefetch, and count it as bytes asked for."""
        sizes = self.each(where, size)
        odd = (address % np.uint64(16) != 0) | (sizes % 16 != 0)
        self.fault_if(odd, where, at, "a prefetch of no multiple of 16")
        for each in np.unique(sizes):
            own = np.flatnonzero(sizes == each)
            try:
                parts = self.memory.of(address[own], int(each))
            except OutOfBounds as error:
                near = self.memory.nearest(int(address[own][error.args[0]]), int(each))
                self.doubt(at, f"prefetches {each} bytes, and {near}")
                continue
            if each == 0:
                self.doubt(at, "prefetches nothing")
            elif self.options.count:
                self._count(self.index(where)[own], address[own], int(each), at, parts)
