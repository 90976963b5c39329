"""Shared memory: bounds, alignment, unwritten bytes, races, bank conflicts, asynchronous copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from tests.compiled.emulator.accesses import Accesses
from tests.compiled.emulator.operands import SHARED_BASE
from tests.compiled.emulator.threads import ALL, Where

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


@njit(cache=True)
def _cycles(words, parts, width):
    """Count the parts of an access, and the most distinct words of one bank, summed over them.

    `parts` ascends; a part has at most 32 words, of `width` consecutive ones per thread.
    """
    count, cycles, first = 0, 0, 0
    seen = np.empty(32 * 4, np.int64)
    while first < len(words):
        last, used = first, 0
        most, per_bank = 0, np.zeros(32, np.int64)
        while last < len(words) and parts[last] == parts[first]:
            for word in range(words[last], words[last] + width):
                if not (seen[:used] == word).any():
                    seen[used] = word
                    used += 1
                    per_bank[word % 32] += 1
                    most = max(most, per_bank[word % 32])
            last += 1
        count, cycles, first = count + 1, cycles + most, last
    return count, cycles


@dataclass
class _Copy:
    """An asynchronous copy of some threads, not yet in shared memory."""

    index: np.ndarray
    places: np.ndarray
    data: np.ndarray
    group: np.ndarray
    at: int

    def part(self, chosen: np.ndarray) -> _Copy:
        place, data, group = self.places[chosen], self.data[chosen], self.group[chosen]
        return _Copy(self.index[chosen], place, data, group, self.at)


class SharedMemory(Accesses):
    """Shared memory of the programs, one behind another.

    Attributes:
        shared: its bytes.
        written: 255 for each byte that was written.
        unfenced: 1 for each byte that wgmma may not see yet, because no fence came after the store.
        wrote, read: the stamp of the last access, by `grain` bytes, see `_look`.
    """

    def begin_shared(self, num_bytes: int) -> None:
        self.shared_bytes, self.grain = num_bytes, self.translation.grain
        self.pitch = -(-max(num_bytes, 16) // 16) * 16
        size = self.pitch * self.count
        self.shared, self.written = np.full(size, _PATTERN, np.uint8), np.zeros(size, np.uint8)
        self.unfenced = np.zeros(size, np.uint8)
        self.wrote = np.full(size // self.grain, -1, np.int64)
        self.read = self.wrote.copy()
        self.group = np.zeros(self.total, np.int64)
        self.copies: list[_Copy] = []

    def _places(self, where: Where, address: Any, width: int, at: int) -> np.ndarray:
        """Return the first byte of each access in `shared`, checked."""
        inside = np.broadcast_to(address, (self.size(where),)).astype(np.int64) - SHARED_BASE
        bad = (inside < 0) | (inside + width > self.shared_bytes)
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            what = f"{width} bytes at {inside[place]} of {self.shared_bytes} of shared memory"
            self.fault(where, at, what, place)
        if (inside % width).any():
            place = int(np.flatnonzero(inside % width)[0])
            what = f"the shared address {inside[place]} is no multiple of {width}"
            self.fault(where, at, what, place)
        return self.program[where] * self.pitch + inside

    def look_for_races(
        self, index: np.ndarray, places: np.ndarray, width: int, at: int, writes: bool,
        marks: bool = True,
    ) -> None:  # fmt: skip
        stamps = self.epoch[self.program[index]] << 6 | self.warp[index]
        self._note_race(places, stamps, width, at, writes, marks)

    def _note_race(
        self, places: np.ndarray, stamps: np.ndarray, width: int, at: int, writes: bool,
        marks: bool = True,
    ) -> None:  # fmt: skip
        found = _look(places, stamps, width, self.grain, self.wrote, self.read, writes, marks)
        for bit, verb in ((1, "wrote"), (2, "read")):
            if found & bit:
                self.doubt(at, f"race: another warp {verb} here since the last barrier")

    def _count_banks(self, where: Where, places: np.ndarray, width: int, at: int) -> None:
        if self.options.count:
            # A warp's access goes in parts of 128 bytes at most: 32, 16 or 8 threads.
            parts = self.index(where) // {16: 8, 8: 16}.get(width, 32)
            counted = _cycles(places // 4, parts, max(1, width // 4))
            self.report.conflicts[self.instructions[at].name] += counted

    def load_shared(self, where: Where, address: Any, size: int, count: int, at: int) -> np.ndarray:
        """Return numbers of `size` bytes, [threads, count]."""
        places = self._places(where, address, size * count, at)
        self._count_banks(where, places, size * count, at)
        self.look_for_races(self.index(where), places, size * count, at, writes=False)
        return self.taken(places, size, count, at)

    def taken(self, places: np.ndarray, size: int, count: int, at: int) -> np.ndarray:
        kind = np.dtype(f"u{size}")
        picked = (places // size)[:, None] + np.arange(count)
        if (self.written.view(kind)[picked] != np.iinfo(kind).max).any():
            self.doubt(at, "reads shared memory that nobody wrote")
        return self.shared.view(kind)[picked]

    def store_shared(self, where: Where, address: Any, size: int, values: list, at: int) -> None:
        width = size * len(values)
        places = self._places(where, address, width, at)
        self._count_banks(where, places, width, at)
        self.look_for_races(self.index(where), places, width, at, writes=True)
        kind = np.dtype(f"u{size}")
        for k, value in enumerate(values):
            picked = places // size + k
            self.shared.view(kind)[picked] = value
            for marks in (self.written, self.unfenced):
                marks.view(kind)[picked] = np.iinfo(kind).max
            if (self.shared.view(kind)[picked] != value).any():
                self.doubt(at, "threads store different values at one place of shared memory")

    def fence_proxy(self, where: Where) -> None:
        """Let wgmma see what was stored."""
        programs = np.unique(self.program[where])
        self.unfenced.reshape(self.count, self.pitch)[programs] = 0

    def copy(self, where: Where, to: Any, of: Any, size: int, given: Any, at: int) -> None:
        """`cp.async`: `given` bytes of `size`, and zeros behind them."""
        index = self.index(where)
        given = np.broadcast_to(given, (len(index),))
        if not np.isin(given, (0, size)).all():
            self.fault(where, at, f"copies neither 0 nor {size} bytes")
        data, chosen = np.zeros((len(index), size), np.uint8), np.flatnonzero(given)
        if len(chosen):
            words = self.load_global(index[chosen], of[chosen], min(8, size), -(-size // 8), at)
            data[chosen] = words.view(np.uint8).reshape(len(chosen), size)
        places = self._places(where, to, size, at)
        # Until it is waited for, no access may come; it is noted when it takes effect.
        self.look_for_races(index, places, size, at, writes=True, marks=False)
        self.copies.append(_Copy(index, places, data, self.group[index], at))
        if not self.options.late:
            self._take_effect(self.copies.pop())

    def _take_effect(self, copy: _Copy) -> None:
        size = copy.data.shape[1]
        self.look_for_races(copy.index, copy.places, size, copy.at, writes=True)
        bytes_of = copy.places[:, None] + np.arange(size)
        self.shared[bytes_of], self.written[bytes_of], self.unfenced[bytes_of] = copy.data, 255, 255

    def commit_copies(self, where: Where) -> None:
        self.group[where] += 1

    def wait_for_copies(self, where: Where, left: int) -> None:
        """Let the copies of these threads take effect, but for their last `left` groups."""
        active = np.zeros(self.total, bool)
        active[where] = True
        kept = []
        for copy in self.copies:
            done = (copy.group <= self.group[copy.index] - 1 - left) & active[copy.index]
            if done.any():
                self._take_effect(copy.part(done))
            if not done.all():
                kept.append(copy.part(~done) if done.any() else copy)
        self.copies = kept

    def operand_bits(
        self, readers: np.ndarray, address: np.ndarray, size: int, at: int
    ) -> np.ndarray:
        """Return [groups, …] numbers that warp groups read, by the first thread of each."""
        inside = address - SHARED_BASE
        if (inside < 0).any() or (inside + size > self.shared_bytes).any():
            self.fault(ALL, at, "an operand outside of shared memory")
        program = self.program[readers]
        base = (program * self.pitch).reshape(-1, *[1] * (address.ndim - 1))
        places = (base + inside).ravel()
        # For later writers, all warps of the group have read.
        stamps = np.repeat(self.epoch[program] << 6 | _MANY, inside[0].size)
        self._note_race(places, stamps, size, at, writes=False)
        if self.unfenced[places].any():
            self.doubt(at, "multiplies what no fence has shown to the asynchronous proxy")
        return self.taken(places, size, 1, at)[:, 0].reshape(address.shape)
