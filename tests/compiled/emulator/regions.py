"""Global memory is the storages of tensors, each with its bounds; anything else is an error."""

from __future__ import annotations

import ctypes
import gc
from functools import cached_property
from typing import Any

import numpy as np
import torch

READ, WRITE, EARLY_READ, EARLY_WRITE = 1, 2, 4, 8
"""Bits of what a launch did to some bytes; early is before it waited for the launch before it."""


class Region:
    """One allocation.

    Attributes:
        marks: what the launch did to each 4 bytes.
        given: whether the launch has a tensor of it among its arguments.
        reads: how often each 4 bytes were read, if that is counted.
        owners: of each 4 bytes, the program whose atomics of scope .cta they are for; -1 of none.
    """

    def __init__(self, tensor: torch.Tensor, name: str, given: bool) -> None:
        self._keep = storage = tensor.untyped_storage()
        self.name, self.given = name, given
        self.start, self.size = storage.data_ptr(), storage.nbytes()
        self.marks = np.zeros(-(-self.size // 4), np.uint8)

    @cached_property
    def reads(self) -> np.ndarray:
        return np.zeros(len(self.marks), np.int64)

    @cached_property
    def owners(self) -> np.ndarray:
        return np.full(len(self.marks), -1)

    def offsets(self, address: np.ndarray) -> np.ndarray:
        return (address - np.uint64(self.start)).astype(np.int64)

    def view(self, size: int) -> np.ndarray:
        """Return the allocation as unsigned numbers of a size."""
        assert self.start % size == 0, f"{self.name} begins at {self.start:#x}"
        buffer = (ctypes.c_uint8 * self.size).from_address(self.start)
        return np.frombuffer(buffer, f"u{size}", self.size // size)


class OutOfBounds(Exception):
    """An access outside of every allocation; its argument is the access's place."""


class GlobalMemory:
    """The allocations that a launch may reach.

    Those of its arguments are known. Others, which it reaches through addresses that lie in a
    tensor, are looked for among all tensors of the process.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, tensor: torch.Tensor, name: str, given: bool = True) -> None:
        start = tensor.untyped_storage().data_ptr()
        if tensor.untyped_storage().nbytes() and all(start != r.start for r in self.regions):
            self.regions.append(Region(tensor, name, given))

    def of(self, address: np.ndarray, width: int) -> list[tuple[Region, Any]]:
        """Return the regions of some accesses, and which of the accesses lie in each.

        Raises:
            OutOfBounds: an access lies in none.
        """
        found, left = [], np.ones(len(address), bool)
        for region in self.regions:
            inside = (address >= region.start) & (address + width <= region.start + region.size)
            if inside.all():
                return [(region, slice(None))]
            if inside.any():
                found.append((region, np.flatnonzero(inside)))
                left &= ~inside
        if not left.any():
            return found
        first = int(np.argmax(left))
        if not self._look_for(int(address[first]), width):
            raise OutOfBounds(first)
        return self.of(address, width)

    def _look_for(self, address: int, width: int) -> bool:
        """Add the tensor that holds these bytes, if there is one."""
        for each in gc.get_objects():
            if type(each) is torch.Tensor and each.layout == torch.strided:
                storage = each.untyped_storage()
                if 0 <= address - storage.data_ptr() <= storage.nbytes() - width:
                    self.add(each, f"a tensor {list(each.shape)}", given=False)
                    return True
        return False

    def nearest(self, address: int, width: int) -> str:
        """Tell how far an access is from the allocation beside it."""
        found = []
        for region in self.regions:
            behind, before = address + width - region.start - region.size, region.start - address
            far, side = max((behind, "behind"), (before, "before"))
            found.append((far, f"{far} bytes {side} {region.name} ({region.size} bytes)"))
        return "reaches " + min(found)[1]
