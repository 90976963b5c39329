"""Seeds for rows that come without one."""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from tpsample.noise import philox4x32

_DOMAIN_SEED = 0x73656564


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
        self.drawn, self.root = 0, secrets.randbits(63) if root is None else root
        self._process = os.getpid()

    def draw(self, count: int) -> Tensor:
        """Return the next seeds, int64 [count]: Philox with the root as key."""
        if os.getpid() != self._process:
            self.drawn, self.root = 0, secrets.randbits(63)
            self._process = os.getpid()
        counted = torch.arange(self.drawn, self.drawn + count)
        zero = torch.zeros_like(counted)
        counter = (counted, zero, zero, torch.full_like(counted, _DOMAIN_SEED))
        key = (self.root & 0xFFFFFFFF, self.root >> 32)
        low, high, *_ = philox4x32(counter, key, 10)
        self.drawn += count
        return (high << 32 | low) & (2**63 - 1)
