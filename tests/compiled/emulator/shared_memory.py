"""Shared memory: bounds, alignment, unwritten bytes, races, bank conflicts, asynchronous copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tests.compiled.emulator.operands import SHARED_BASE
from tests.compiled.emulator.pending import Pending
from tests.compiled.emulator.threads import ALL, Launch, Where

_MANY = 63
"""In place of a warp, where several have read in one epoch."""
_PATTERN = 0xCD


@njit(cache=True)
def _look(places, stamps, width, grain, wrote, read, writes, marks):
    """Look for accesses of other warps since the last barrier, then note these.

    A stamp is 64 · epoch + warp. Returns 1 after another warp's write, 2 after another's read.
    """
    found = 0
    for k in range(len(places)):
        for cell in range(places[k] // grain, (places[k] + width - 1) // grain + 1):
            stamp = stamps[k]
            if wrote[cell] != stamp and wrote[cell] >> 6 == stamp >> 6:
                found |= 1
            if writes and read[cell] != stamp and read[cell] >> 6 == stamp >> 6:
                found |= 2
    if marks:
        for k in range(len(places)):
            for cell in range(places[k] // grain, (places[k] + width - 1) // grain + 1):
                stamp = stamps[k]
                if writes:
                    wrote[cell] = stamp
                elif read[cell] >> 6 == stamp >> 6 and read[cell] != stamp:
                    read[cell] = (stamp >> 6 << 6) | _MANY
                else:
                    read[cell] = stamp
    return found


def _cycles(words: np.ndarray, parts: np.ndarray, width: int) -> tuple[int, int]:
    """Count the parts of an access, and the most distinct words of one bank, summed over them.

    A thread has `width` consecutive words, and threads of one part go together.
    """
    parts = np.unique(parts, return_inverse=True)[1]
    keys = (parts[:, None] << 40 | words[:, None] + np.arange(width)).ravel()
    distinct = np.unique(keys)
    used = np.zeros((parts.max() + 1, 32), np.int64)
    np.add.at(used, (distinct >> 40, distinct % 32), 1)
    return len(used), int(used.max(1).sum())


class SharedMemory(Pending):
    """Shared memory of the programs, one behind another.

    Attributes:
        shared: its bytes.
        written: 255 for each byte that was written.
        unfenced: 255 for each byte that asynchronous products may not see yet, because no fence
            came after the store.
        wrote, read: the stamp of the last access, by `grain` bytes, see `_look`.
    """

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        super().__init__(launch, programs)
        self.pitch = -(-max(launch.shared_bytes, 16) // 16) * 16
        self.grain, size = launch.translation.grain, self.pitch * self.count
        self.shared, self.written = np.full(size, _PATTERN, np.uint8), np.zeros(size, np.uint8)
        self.unfenced = np.zeros(size, np.uint8)
        self.wrote, self.read = np.full((2, size // self.grain), -1, np.int64)

    def _places(self, where: Where, address: Any, width: int, at: int) -> np.ndarray:
        """Return the first byte of each access in `shared`, checked."""
        of = self.launch.shared_bytes
        inside = self.each(where, address).astype(np.int64) - SHARED_BASE
        bad = (inside < 0) | (inside + width > of)
        self.fault_if(bad, where, at, f"{width} bytes outside of the {of} of shared memory")
        odd = inside % width != 0
        self.fault_if(odd, where, at, f"a shared address is no multiple of {width}")
        return self.program[where] * self.pitch + inside

    def look_for_races(
        self, index: np.ndarray, places: np.ndarray, width: int, at: int, *, writes: bool,
        marks: bool = True, warp: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        stamps = self.epoch[self.program[index]] << 6 | (self.warp[index] if warp is None else warp)
        found = _look(places, stamps, width, self.grain, self.wrote, self.read, writes, marks)
        for bit, verb in ((1, "wrote"), (2, "read")):
            if found & bit:
                self.doubt(at, f"race: another warp {verb} here since the last barrier")

    def _count_banks(self, where: Where, places: np.ndarray, width: int, at: int) -> None:
        if self.options.count:
            # A warp's access goes in parts of 128 bytes at most: 32, 16 or 8 threads.
            parts = self.index(where) // {16: 8, 8: 16}.get(width, 32)
            counted = _cycles(places // 4, parts, max(1, width // 4))
            self.report.conflicts[self.name, self.instructions[at].name] += counted

    def load_shared(self, where: Where, address: Any, size: int, count: int, at: int) -> np.ndarray:
        """Return numbers of `size` bytes, [threads, count]."""
        places = self._places(where, address, size * count, at)
        self._count_banks(where, places, size * count, at)
        self.look_for_races(self.index(where), places, size * count, at, writes=False)
        return self._taken(places, size, count, at)

    def _taken(self, places: np.ndarray, size: int, count: int, at: int) -> np.ndarray:
        kind = np.dtype(f"u{size}")
        picked = (places // size)[:, None] + np.arange(count)
        if (self.written.view(kind)[picked] != np.iinfo(kind).max).any():
            self.doubt(at, "reads shared memory that nobody wrote")
        return self.shared.view(kind)[picked]

    def store_shared(self, where: Where, address: Any, size: int, values: list, at: int) -> None:
        width, kind = size * len(values), np.dtype(f"u{size}")
        places = self._places(where, address, width, at)
        self._count_banks(where, places, width, at)
        self.look_for_races(self.index(where), places, width, at, writes=True)
        for k, value in enumerate(values):
            picked = places // size + k
            self.shared.view(kind)[picked] = value
            for marks in (self.written, self.unfenced):
                marks.view(kind)[picked] = np.iinfo(kind).max
            if (self.shared.view(kind)[picked] != value).any():
                self.doubt(at, "threads store different values at one place of shared memory")

    def fence_proxy(self, where: Where) -> None:
        """Let asynchronous products see what was stored."""
        programs = np.unique(self.program[where])
        self.unfenced.reshape(self.count, self.pitch)[programs] = 0

    def copy(self, where: Where, to: Any, of: Any, size: int, given: Any, at: int) -> None:
        """`cp.async`: `given` bytes of `size`, and zeros behind them."""
        index = self.index(where)
        given = self.each(where, given)
        if not np.isin(given, (0, size)).all():
            self.fault(where, at, f"copies neither 0 nor {size} bytes")
        data, chosen = np.zeros((len(index), size), np.uint8), np.flatnonzero(given)
        if len(chosen):
            words = self.load_global(index[chosen], of[chosen], min(8, size), -(-size // 8), at)
            data[chosen] = words.view(np.uint8).reshape(len(chosen), size)
        places = self._places(where, to, size, at)
        # Until it is waited for, no access may come; it is noted when it takes effect.
        self.look_for_races(index, places, size, at, writes=True, marks=False)

        def effect(own: np.ndarray) -> None:
            self.look_for_races(index[own], places[own], size, at, writes=True)
            bytes_of = places[own, None] + np.arange(size)
            self.shared[bytes_of] = data[own]
            self.written[bytes_of] = self.unfenced[bytes_of] = 255

        self.later("copies", index, effect)

    def operand_bits(
        self, readers: np.ndarray, address: np.ndarray, size: int, at: int, marks: bool
    ) -> np.ndarray:
        """Return numbers that asynchronous products read, [products, …], by a thread of each.

        Args:
            marks: whether later writers must come after a barrier.
        """
        inside = address - SHARED_BASE
        if (inside < 0).any() or (inside + size > self.launch.shared_bytes).any():
            self.fault(ALL, at, "an operand outside of shared memory")
        base = (self.program[readers] * self.pitch).reshape(-1, *[1] * (address.ndim - 1))
        places, many = (base + inside).ravel(), np.int64(_MANY)
        own = np.repeat(readers, inside[0].size)
        self.look_for_races(own, places, size, at, writes=False, marks=marks, warp=many)
        if self.unfenced[places].any():
            self.doubt(at, "multiplies what no fence has shown to the asynchronous proxy")
        return self._taken(places, size, 1, at)[:, 0].reshape(address.shape)
