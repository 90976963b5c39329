"""Stores that others may not see yet, as the memory model of PTX allows.

A program's stores, and its atomics whose result is not used, wait here. They become visible in
any order, except that stores to one address keep theirs. A release of a thread makes visible what
it stored, and what its program stored before the last barrier. A program sees its own stores.
So a missing barrier, fence or release before a flag shows as a value that others do not have yet.

Not modelled: loads that return older values than memory has, which a missing acquire would allow.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tests.compiled.emulator.global_memory import START, process_memory

ATOMICS = ("store", "add", "max", "min", "or", "and")
STORES = np.dtype(
    [
        *((name, "i8") for name in ("program", "thread", "epoch", "address", "value")),
        *((name, "i1") for name in ("size", "signed", "how")),
    ]
)
"""Stores and atomics: the place in ATOMICS is `how`, and `epoch` counts barriers before it."""
_CHANCE = 0.05
"""How often stores become visible without a reason, per basic block."""


@njit(cache=True)
def _performed(memory, stores):
    old = np.empty(len(stores), np.int64)
    for k in range(len(stores)):
        store, before = stores[k], np.int64(0)
        first, value, how = store.address - START, store.value, store.how
        for byte in range(store.size):
            before |= np.int64(memory[first + byte]) << (8 * byte)
        if store.signed:
            before = before << (64 - 8 * store.size) >> (64 - 8 * store.size)
        if how == 1:
            value = before + value
        elif how == 2:
            value = max(before, value)
        elif how == 3:
            value = min(before, value)
        elif how == 4:
            value = before | value
        elif how == 5:
            value = before & value
        for byte in range(store.size):
            memory[first + byte] = (value >> (8 * byte)) & 255
        old[k] = before
    return old


def perform(stores: np.ndarray) -> np.ndarray:
    """Change memory by one store after another; return what was there before each."""
    return _performed(process_memory(1), stores)


class StoreBuffers:
    """The stores of a launch that only their own program is sure to see."""

    def __init__(self, seed: tuple[int, int]) -> None:
        self._random, self._waiting = np.random.default_rng(seed), np.empty(0, STORES)

    def hold(self, stores: np.ndarray) -> None:
        self._waiting = np.concatenate([self._waiting, stores])

    def _show(self, chosen: np.ndarray) -> None:
        """Make stores visible, in their order within a program, programs in any order."""
        shown = self._waiting[chosen]
        if len(shown):
            self._waiting = self._waiting[~chosen]
            programs, of = np.unique(shown["program"], return_inverse=True)
            turn = self._random.permutation(len(programs))[of]
            perform(shown[np.argsort(turn, kind="stable")])

    def release(self, own: np.ndarray) -> None:
        """Show what these threads stored, and their programs before the last barrier."""
        epochs = np.full(
            1 + max(each["program"].max(initial=0) for each in (own, self._waiting)), -1
        )
        epochs[own["program"]] = own["epoch"]
        before = self._waiting["epoch"] < epochs[self._waiting["program"]]
        self._show(before | np.isin(self._waiting["thread"], own["thread"]))

    def show_own(self, programs: np.ndarray, address: np.ndarray, width: int) -> None:
        """Show what programs stored near addresses that they access now."""
        if len(self._waiting):
            first, last = (self._keys(programs, address + more) for more in (0, width - 1))
            self._show(
                np.isin(
                    self._keys(self._waiting["program"], self._waiting["address"]),
                    np.append(first, last),
                )
            )

    @staticmethod
    def _keys(programs: np.ndarray, address: np.ndarray) -> np.ndarray:
        return (address >> 3 << 16) + programs

    def pass_time(self) -> None:
        """Show some stores now and then."""
        if len(self._waiting) and self._random.random() < _CHANCE:
            salt = int(self._random.integers(1, 1 << 16)) | 1
            self._show(((self._waiting["address"] >> 3) * salt >> 7) % 3 == 0)

    def show_all(self) -> None:
        """The launch has ended."""
        self._show(np.ones(len(self._waiting), bool))
