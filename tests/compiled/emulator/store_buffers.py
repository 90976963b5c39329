"""Stores that others may not see yet, as the memory model of PTX allows.

A program's stores, and its atomics whose result is not used, wait here. They become visible in
any order, except that stores to one address keep theirs. A release of a thread makes visible what
it stored, and what its program stored before the last barrier. A program sees its own stores.
So a missing barrier, fence or release before a flag shows as a value that others do not have yet.

Not modelled: loads that return older values than memory has, which a missing acquire would allow.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class _Waiting:
    """One instruction's stores: of each its program, thread, epoch of barriers, place and value."""

    region: Region
    dtype: np.dtype
    how: int
    program: np.ndarray
    thread: np.ndarray
    epoch: np.ndarray
    place: np.ndarray
    value: np.ndarray

    def part(self, chosen: np.ndarray) -> _Waiting:
        arrays = (self.program, self.thread, self.epoch, self.place, self.value)
        return _Waiting(self.region, self.dtype, self.how, *(each[chosen] for each in arrays))

    @property
    def cell(self) -> np.ndarray:
        """The address of each store, in units of 8 bytes."""
        return (self.region.start + self.place * self.dtype.itemsize) >> 3


class StoreBuffers:
    """The stores of a launch that only their own program is sure to see."""

    def __init__(self, seed: int) -> None:
        self._random, self._waiting = np.random.default_rng(seed), list[_Waiting]()

    def hold(
        self, region: Region, dtype: np.dtype, how: str, program: np.ndarray, thread: np.ndarray,
        epoch: np.ndarray, place: np.ndarray, value: np.ndarray,
    ) -> None:  # fmt: skip
        kept = (program, thread, epoch, place, value.copy())
        self._waiting.append(_Waiting(region, dtype, ATOMICS.index(how), *kept))

    def _show(self, choose) -> None:
        """Make stores visible, in their order within a program, programs in any order."""
        kept, shown = [], list[_Waiting]()
        for each in self._waiting:
            chosen = choose(each)
            if chosen.any():
                shown.append(each.part(chosen))
            if not chosen.all():
                kept.append(each.part(~chosen) if chosen.any() else each)
        self._waiting = kept
        if shown:
            for program in self._random.permutation(
                np.unique(np.concatenate([x.program for x in shown]))
            ):
                for each in shown:
                    one = each.program == program
                    memory = each.region.view(each.dtype.itemsize).view(each.dtype)
                    perform(memory, each.place[one], each.value[one], each.how)

    def release(self, programs: np.ndarray, threads: np.ndarray, epochs: np.ndarray) -> None:
        """Show what these threads stored, and their programs before the last barrier."""
        epoch_of = dict(zip(programs.tolist(), epochs.tolist(), strict=True))

        def choose(each: _Waiting) -> np.ndarray:
            now = np.array([epoch_of.get(p, -1) for p in each.program.tolist()])
            return (each.epoch < now) | np.isin(each.thread, threads)

        if self._waiting:
            self._show(choose)

    def show_own(self, programs: np.ndarray, address: np.ndarray, width: int) -> None:
        """Show what programs stored near addresses that they access now."""
        if self._waiting:
            cells = np.concatenate([address >> 3, (address + width - 1) >> 3]).astype(np.int64)
            keys = cells * 4096 + np.tile(programs, 2) % 4096
            self._show(lambda each: np.isin(each.cell * 4096 + each.program % 4096, keys))

    def pass_time(self) -> None:
        """Show some stores now and then."""
        if self._waiting and self._random.random() < _CHANCE:
            salt = int(self._random.integers(1, 1 << 30)) | 1
            self._show(lambda each: (each.cell * salt >> 7) % 3 == 0)

    def show_all(self) -> None:
        """The launch has ended."""
        self._show(lambda each: np.ones(len(each.place), bool))
