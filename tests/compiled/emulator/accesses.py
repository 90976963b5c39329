"""Accesses of global memory: bounds, alignment, atomics, early launches, prefetches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.compiled.emulator.global_memory import (
    EARLY,
    READ,
    START,
    WRITE,
    OutOfBounds,
    process_memory,
)
from tests.compiled.emulator.store_buffers import ATOMICS, STORES, perform
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

    def _reach(
        self, where: Where, address: np.ndarray, width: int, at: int, kind: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return addresses as integers, their cells, and which are of arguments; all checked."""
        address, index = address.astype(np.int64), self.index(where)
        self.fault_if(address % width != 0, where, at, f"an address is no multiple of {width}")
        if self.buffers is not None:
            self.buffers.show_own(self.grid_program[index], address, width)
        try:
            cells, given = self.memory.of(address, width)
        except OutOfBounds as error:
            place = error.args[0]
            near = self.memory.nearest(int(address[place]), width)
            self.fault(where, at, f"{width} bytes, which {near}", place)
        self.memory.marks[cells] |= kind
        if self.launch.early:
            self.memory.marks[cells[self.early[index]]] |= kind * EARLY
        if self.options.count and kind == READ:
            np.add.at(self.memory.reads, cells, 1)
        return address, cells, given

    def load_global(
        self, where: Where, address: np.ndarray, size: int, count: int, at: int
    ) -> np.ndarray:
        """Return numbers of `size` bytes, [threads, count]."""
        address, *_ = self._reach(where, address, size * count, at, READ)
        return process_memory(size)[((address - START) // size)[:, None] + np.arange(count)]

    def store_global(
        self, where: Where, address: np.ndarray, size: int, values: list, at: int
    ) -> None:
        address, _, given = self._reach(where, address, size * len(values), at, WRITE)
        if not given.all():
            self.report.far_stores[self.name, self.instructions[at].name] += len(given)
        for k, value in enumerate(values):
            if self.buffers is not None:
                self.buffers.hold(self._stores(where, address + k * size, value, size, "store"))
                continue
            memory, places = process_memory(size), (address - START) // size + k
            memory[places] = value
            if (memory[places] != value).any():
                self.doubt(at, "threads store different values at one place of global memory")

    def atomic(
        self, where: Where, name: str, order: str, scope: str, address: np.ndarray, dtype: Any,
        value: Any, at: int,
    ) -> np.ndarray:  # fmt: skip
        """Perform atomics one after another; return what was there before each."""
        size = dtype().itemsize
        address, cells, _ = self._reach(where, address, size, at, WRITE)
        if scope == "cta":
            self._own_cells(where, cells, at)
        stores = self._stores(where, address, self.each(where, value).astype(dtype), size, name)
        if self.buffers is not None and order in ("release", "acq_rel"):
            self.buffers.release(stores)
        reduces = at in self.launch.translation.reductions
        if self.buffers is not None and order == "relaxed" and reduces:
            self.buffers.hold(stores)
            return np.zeros(len(stores), dtype)
        turn = np.arange(len(stores))
        if self._random is not None:
            turn = self._random.permutation(turn)
        before = np.empty(len(stores), dtype)
        before[turn] = perform(stores[turn])
        return before

    def _stores(
        self, where: Where, address: np.ndarray, value: Any, size: int, how: str
    ) -> np.ndarray:
        index, stores = self.index(where), np.empty(len(address), STORES)
        stores["program"], stores["address"] = self.grid_program[index], address
        stores["thread"] = stores["program"] * self.threads + index % self.threads
        stores["epoch"] = self.epoch[self.program[index]]
        stores["value"] = np.asarray(value).astype(np.int64)
        stores["size"], stores["how"] = size, ATOMICS.index(how)
        stores["signed"] = np.asarray(value).dtype.kind == "i"
        return stores

    def _own_cells(self, where: Where, cells: np.ndarray, at: int) -> None:
        """Atomics of scope .cta are none towards other programs."""
        programs, owners = self.grid_program[self.index(where), None], self.memory.owners
        before = owners[cells]
        owners[cells] = programs
        if ((before >= 0) & (before != programs) | (owners[cells] != programs)).any():
            self.doubt(at, "atomics of scope .cta of several programs at one place")

    def wait_for_launch(self, where: Where) -> None:
        self.early[where] = False

    def let_next_start(self, where: Where) -> None:
        self.launch.next_started = True

    def prefetch(self, where: Where, address: np.ndarray, size: Any, at: int) -> None:
        """Check a bulk prefetch, and count its bytes."""
        address, sizes = address.astype(np.int64), self.each(where, size).astype(np.int64)
        odd = (address % 16 != 0) | (sizes % 16 != 0)
        self.fault_if(odd, where, at, "a prefetch of no multiple of 16")
        self.report.prefetched += int(sizes.sum())
        for each in np.unique(sizes).tolist():
            own = address[sizes == each]
            try:
                self.memory.of(own, each)
            except OutOfBounds as error:
                near = self.memory.nearest(int(own[error.args[0]]), each)
                self.doubt(at, f"prefetches {each} bytes, and {near}")
            if each == 0:
                self.doubt(at, "prefetches nothing")
