"""Seeds for rows that come without one."""

from __future__ import annotations

import secrets

import torch

from tpsample.noise import philox4x32

_DOMAIN_SEED = 0x73656564


class SeedSource:
    """63-bit seeds derived from one random number; equal on ranks that share the number.

    Args:
        root: 63 random bits; None draws them.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = secrets.randbits(63) if root is None else root
        self._drawn = 0

    def next(self) -> int:
        """The next seed: Philox keyed by the root, counted by the number of seeds drawn."""
        counter = tuple(torch.tensor(c) for c in (self._drawn, 0, 0, _DOMAIN_SEED))
        key = (self.root & 0xFFFFFFFF, self.root >> 32)
        low, high, *_ = philox4x32(counter, key, 10)  # type: ignore[arg-type]
        self._drawn += 1
        return (int(high) << 32 | int(low)) & (2**63 - 1)


def signed64(seed: int) -> int:
    """64 bits of a seed as int64 holds them."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits
