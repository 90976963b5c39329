"""The per-row part of a score: seed, random streams, scale. Twin: `triton_.kernels.noise`."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tpsample.core.checks import check_int, describe, is_integer
from tpsample.core.tensors import ordinary_tensors
from tpsample.noise import philox4x32, row_stream, signed64

LOG2_E = math.log2(math.e)

GREEDY_BELOW = 1e-5
"""A row with a lower temperature is greedy: it takes the argmax of the logits, without noise."""

HOTTEST = 2.0**100
"""A higher temperature counts as this one, because log2 e / T must not vanish."""


@dataclass(eq=False)  # frozen, each field would take three times as long
class RowNoise:
    """The per-row part of a score: scale and random streams. Computed on first use.

    Attributes:
        temperature: fp32 [B].
        seed, positions: int64 [B].
        num_samples: draws per row.
    """

    temperature: Tensor
    seed: Tensor
    positions: Tensor
    num_samples: int

    @cached_property
    def _safe(self) -> tuple[Tensor, ...]:
        return safe_temperature(self.temperature)

    @property
    def safe_temperature(self) -> Tensor:
        """fp32 [B], 1 for greedy rows."""
        return self._safe[0]

    @property
    def random(self) -> Tensor:
        """bool [B, 1], False for greedy rows."""
        return self._safe[1].unsqueeze(1)

    @cached_property
    def scale(self) -> Tensor:
        """fp32 [B, 1], log2 e / T, 1 for greedy rows."""
        safe = self.safe_temperature.unsqueeze(1)
        return torch.where(self.random, (LOG2_E / safe.double()).float(), 1.0)

    @cached_property
    def streams(self) -> list[tuple[Tensor, ...]]:
        """One row stream per sample, int64 tensors [B, 1]."""
        seed, positions = self.seed.unsqueeze(1), self.positions.unsqueeze(1)
        return [row_stream(seed, positions, sample) for sample in range(self.num_samples)]

    def select(self, index: Tensor | slice) -> RowNoise:
        """Return the same for some of the rows; of a slice that has all of them, itself."""
        if has_all(index, self.seed.shape[0]):
            return self
        chosen = replace(
            self,
            temperature=self.temperature[index],
            seed=self.seed[index],
            positions=self.positions[index],
        )
        if "_safe" in vars(self):
            vars(chosen)["_safe"] = tuple(tensor[index] for tensor in self._safe)
        if "streams" in vars(self):  # made by about a hundred operators, so they are not made again
            vars(chosen)["streams"] = [tuple(r[index] for r in stream) for stream in self.streams]
        return chosen


def has_all(index: Tensor | slice, count: int) -> bool:
    """Return whether an index is a slice that has all of so many rows, in order."""
    return isinstance(index, slice) and index.indices(count) == (0, count, 1)


def safe_temperature(temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return temperatures with 1 for greedy rows, and whether each row is random.

    Whatever fp32 number a column holds has a meaning, because a caller may write into it. A row is
    greedy where the number is negative or NaN, and no row is hotter than HOTTEST.
    """
    random = temperature >= GREEDY_BELOW
    return torch.where(random, temperature.clamp(max=HOTTEST), 1.0), random


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
        low, high, *_ = philox4x32(counter, key)
        return (high << 32 | low) & (2**63 - 1)


DOMAIN_FORK = 0x666F726B


def forked_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of texts that go on from one: its own, then others that follow from it.

    seed_i = r0 + 2^32 r1 of the row stream at position i, in a domain of its own; i > 0
    """
    seed_tensor = torch.tensor(signed64(seed), device="cpu")
    low, high, *_ = row_stream(seed_tensor, torch.arange(count, device="cpu"), domain=DOMAIN_FORK)
    return [seed, *(low | high << 32).tolist()[1:]]


DOMAIN_IDENTITY = 0x6D696E74


def seed_of(master: int, *identity: int) -> int:
    """Return the seed of a text that is known by numbers, such as a prompt's and a sample's.

        s_0 = master,   s_(i+1) = r0 + 2^32 r1 of the row stream of seed s_i at position identity_i
        and sample i, in a domain of its own;   the seed is the last s, mod 2^63

    So a rollout is drawn again from its master and its identity, in any batch and order. Two texts
    share their noise with a chance of 2^-63. A name becomes a number by a digest, such as
    ``int.from_bytes(hashlib.sha256(name).digest()[:8], "big")``.

    Examples:
        >>> seed_of(7, 0, 3)
        8835139292150294775

    Args:
        master: 64 bits, of the run.
        identity: at least one number of 64 bits each, in an order that stays.

    Raises:
        TypeError: a number is no int, or there is none.
        ValueError: a number has more than 64 bits.
    """
    if not identity or not all(map(is_integer, (master, *identity))):
        raise TypeError(
            f"seed_of: expected a master and at least one number, all ints, got "
            f"{describe((master, *identity))}; a name becomes a number by a digest"
        )
    for number in (master, *identity):
        check_int("seed_of", number, -(2**63), 2**64 - 1)
    seed = int(master)
    for sample, number in enumerate(identity):
        key, position = (torch.tensor(signed64(int(x)), device="cpu") for x in (seed, number))
        low, high, *_ = row_stream(key, position, sample, domain=DOMAIN_IDENTITY)
        seed = int(low | high << 32)
    return seed & (2**63 - 1)
