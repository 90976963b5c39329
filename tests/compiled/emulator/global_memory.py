"""Global memory is the storages of tensors, each with its bounds; anything else is an error."""

from __future__ import annotations

import ctypes
import gc
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from weakref import WeakValueDictionary

import numpy as np
import torch

READ, WRITE, EARLY = 1, 2, 4
"""Bits of what a launch did to some bytes; times EARLY before it waited for the launch before."""
START = 4096
"""No tensor lies below this address."""


@cache
def process_memory(size: int) -> np.ndarray:
    """Return the memory of this process from START on, as unsigned numbers of a size."""
    return np.frombuffer((ctypes.c_uint8 * (1 << 47)).from_address(START), f"u{size}")


@dataclass(frozen=True, order=True)
class Region:
    """One allocation.

    Attributes:
        given: whether the launch has a tensor of it among its arguments.
        cell: its first 4 bytes, in `GlobalMemory.marks`.
    """

    start: int
    stop: int
    name: str
    given: bool
    cell: int


_found = WeakValueDictionary[int, torch.Tensor]()
"""Tensors that launches found through an address, by where they begin."""


def _tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors of the process, those that were found before first."""
    yield from list(_found.values())
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.layout == torch.strided:
            yield each


class OutOfBounds(Exception):
    """An access outside of every allocation; its argument is the access's place."""


class GlobalMemory:
    """The allocations that a launch may reach.

    Those of its arguments are known. Others, which it reaches through addresses that lie in a
    tensor, are looked for among all tensors of the process.

    Attributes:
        marks: what the launch did to each 4 bytes.
        reads: how often each 4 bytes were read, if that is counted.
        owners: of each 4 bytes, the program whose atomics of scope .cta they are for; -1 of none.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.marks, self.reads, self.owners = np.zeros(0, np.uint8), *np.zeros((2, 0), np.int64)
        self._kept: list[torch.UntypedStorage] = []

    def add(self, tensor: torch.Tensor, name: str, given: bool = True) -> None:
        storage = tensor.untyped_storage()
        start, size, cell = storage.data_ptr(), storage.nbytes(), len(self.marks)
        if size and all(start != region.start for region in self.regions):
            assert start % 16 == 0, f"{name} begins at {start:#x}"
            insort(self.regions, Region(start, start + size, name, given, cell))
            columns = zip(*((r.start, r.stop, r.cell, r.given) for r in self.regions), strict=True)
            self._start, self._stop, self._cell, self._given = map(np.array, columns)
            more = np.zeros(-(-size // 4), np.int64)
            self.marks = np.append(self.marks, more.astype(np.uint8))
            self.reads, self.owners = np.append(self.reads, more), np.append(self.owners, more - 1)
            self._kept.append(storage)

    def of(self, address: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells of some accesses, [accesses, cells], and which are of arguments.

        Raises:
            OutOfBounds: an access lies in no allocation.
        """
        found = np.searchsorted(self._start, address, "right") - 1
        outside = (found < 0) | (address + width > self._stop[found])
        if outside.any():
            first = int(np.argmax(outside))
            if not self._look_for(int(address[first]), width):
                raise OutOfBounds(first)
            return self.of(address, width)
        cells = self._cell[found] + ((address - self._start[found]) >> 2)
        return cells[:, None] + np.arange(max(1, width // 4)), self._given[found]

    def _look_for(self, address: int, width: int) -> bool:
        """Add the tensor that holds these bytes, if there is one."""
        for each in _tensors():
            storage = each.untyped_storage()
            if 0 <= address - storage.data_ptr() <= storage.nbytes() - width:
                self.add(each, f"a tensor {list(each.shape)}", given=False)
                _found[storage.data_ptr()] = each
                return True
        return False

    def nearest(self, address: int, width: int) -> str:
        """Tell how far an access is from the allocation beside it."""
        found = []
        for region in self.regions:
            behind, before = address + width - region.stop, region.start - address
            far, side = max((behind, "behind"), (before, "before"))
            size = region.stop - region.start
            found.append((far, f"{far} bytes {side} {region.name} ({size} bytes)"))
        return "reaches " + min(found)[1]

    def cells_of(self, region: Region) -> slice:
        return slice(region.cell, region.cell + -(-(region.stop - region.start) // 4))

    def overlaps(self, before: GlobalMemory) -> Iterator[str]:
        """Yield the tensors that a launch touched too early, if one before it may still run.

        Until it has waited, it must not touch what others write, nor write what they read.
        """
        others = {(region.start, region.stop): region for region in before.regions}
        for region in self.regions:
            if other := others.get((region.start, region.stop)):
                own, theirs = (
                    self.marks[self.cells_of(region)],
                    before.marks[before.cells_of(other)],
                )
                touches = (own >= EARLY) & (theirs & WRITE > 0)
                if (touches | ((own & EARLY * WRITE > 0) & (theirs > 0))).any():
                    yield region.name
