"""Seeds for rows that come without one."""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from tpsample.core.tensors import ordinary_tensors
from tpsample.noise import philox4x32

_DOMAIN_SEED = 0x73656564
_AHEAD = 256
"""Seeds made at a time: one costs as much as all of these."""


class SeedSource:
    """63-bit seeds derived from one random number; equal on ranks that share the number.

    A process that is forked later draws from a number of its own, so that it does not repeat its
    parent's seeds.

    Args:
        root: 63 random bits; None draws them.

    Attributes:
        drawn: how many seeds have been drawn.
    """

    def __init__(self, root: int | None = None) -> None:
        self._first, self._made = 0, torch.empty(0, dtype=torch.int64, device="cpu")
        self._begin(secrets.randbits(63) if root is None else root)

    def draw(self, count: int) -> Tensor:
        """Return the next seeds, int64 [count]: Philox with the root as key."""
        if os.getpid() != self._process:
            self._begin(secrets.randbits(63))
        if self.drawn + count > self._first + len(self._made):
            self._first, self._made = self.drawn, self._make(max(count, _AHEAD))
        start = self.drawn - self._first
        self.drawn += count
        return self._made[start : start + count].clone()

    def _begin(self, root: int) -> None:
        self.drawn, self.root, self._process = 0, root, os.getpid()
        self._first, self._made = 0, self._made[:0]

    @ordinary_tensors
    def _make(self, count: int) -> Tensor:
        """Return so many seeds from the next one on."""
        counted = torch.arange(self.drawn, self.drawn + count, device="cpu")
        zero = torch.zeros_like(counted)
        counter = (counted, zero, zero, torch.full_like(counted, _DOMAIN_SEED))
        key = (self.root & 0xFFFFFFFF, self.root >> 32)
        low, high, *_ = philox4x32(counter, key, 10)
        return (high << 32 | low) & (2**63 - 1)
