"""Stores that others may not see yet, as the memory model of PTX allows.

A program's stores, and its atomics whose result is not used, wait here. They become visible in
any order, except that stores to one address keep theirs. A release of a thread makes visible what
it stored, and what its program stored before the last barrier. A program sees its own stores.
So a missing barrier, fence or release before a flag shows as a value that others do not have yet.

Not modelled: loads that return older values than memory has, which a missing acquire would allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from tests.compiled.emulator.regions import Region

ATOMICS = ("store", "add", "max", "min", "or", "and")
_CHANCE = 0.05
"""How often stores become visible without a reason, per basic block."""


@njit(cache=True)
def perform(memory, places, values, how):
    """Change memory by one atomic after another; return what was there before each."""
    old = np.empty(len(places), memory.dtype)
    for k in range(len(places)):
        place, value = places[k], values[k]
        before = old[k] = memory[place]
        if how == 0:
            memory[place] = value
        elif how == 1:
            memory[place] = before + value
        elif how == 2:
            memory[place] = max(before, value)
        elif how == 3:
            memory[place] = min(before, value)
        elif how == 4:
            memory[place] = before | value
        else:
            memory[place] = before & value
    return old


@dataclass
class Waiting:
    """One instruction's stores: of each its program, thread, epoch of barriers, place and value."""

    region: Region
    memory: np.ndarray
    how: str
    program: np.ndarray
    thread: np.ndarray
    epoch: np.ndarray
    place: np.ndarray
    value: np.ndarray

    def part(self, chosen: np.ndarray) -> Waiting:
        names = ("program", "thread", "epoch", "place", "value")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @property
    def cell(self) -> np.ndarray:
        """The address of each store, in units of 8 bytes."""
        return (self.region.start + self.place * self.memory.itemsize) >> 3


class StoreBuffers:
    """The stores of a launch that only their own program is sure to see."""

    def __init__(self, seed: int) -> None:
        self._random, self.waiting = np.random.default_rng(seed), list[Waiting]()

    def show(self, choose: Callable[[Waiting], np.ndarray]) -> None:
        """Make stores visible, in their order within a program, programs in any order."""
        if not self.waiting:
            return
        chosen = [choose(each) for each in self.waiting]
        parts = zip(self.waiting, chosen, strict=True)
        shown = [each.part(own) for each, own in parts if own.any()]
        parts = zip(self.waiting, chosen, strict=True)
        self.waiting = [
            each.part(~own) if own.any() else each for each, own in parts if not own.all()
        ]
        programs = np.unique(np.concatenate([each.program for each in shown] or [[]]))
        for program in self._random.permutation(programs):
            for each in shown:
                own = each.program == program
                perform(each.memory, each.place[own], each.value[own], ATOMICS.index(each.how))

    def release(self, programs: np.ndarray, threads: np.ndarray, epochs: np.ndarray) -> None:
        """Show what these threads stored, and their programs before the last barrier."""
        now = np.full(int(programs.max()) + 1, -1)
        now[programs] = epochs

        def choose(each: Waiting) -> np.ndarray:
            inside = each.program < len(now)
            before = each.epoch < now[np.where(inside, each.program, 0)]
            return (inside & before) | np.isin(each.thread, threads)

        self.show(choose)

    def show_own(self, programs: np.ndarray, address: np.ndarray, width: int) -> None:
        """Show what programs stored near addresses that they access now."""
        if self.waiting:
            cells = np.concatenate([address >> 3, (address + width - 1) >> 3]).astype(np.int64)
            keys, low, high = cells * 4096 + np.tile(programs, 2) % 4096, cells.min(), cells.max()

            def choose(each: Waiting) -> np.ndarray:
                if each.cell.max() < low or high < each.cell.min():
                    return np.zeros(len(each.place), bool)
                return np.isin(each.cell * 4096 + each.program % 4096, keys)

            self.show(choose)

    def pass_time(self) -> None:
        """Show some stores now and then."""
        if self.waiting and self._random.random() < _CHANCE:
            salt = int(self._random.integers(1, 1 << 30)) | 1
            self.show(lambda each: (each.cell * salt >> 7) % 3 == 0)

    def show_all(self) -> None:
        """The launch has ended."""
        self.show(lambda each: np.ones(len(each.place), bool))
