"""The per-row part of a score: scale and random streams. Twin: `tpsample.kernels.row_noise`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tpsample.noise import row_stream

LOG2_E = math.log2(math.e)

GREEDY_BELOW = 1e-5
"""A row with a lower temperature is greedy: it takes the argmax of the logits, without noise."""


@dataclass(frozen=True)
class RowNoise:
    """The per-row part of a score: scale and random streams. Computed on first use.

    Attributes:
        temperature: fp32 [B].
        seed, positions: int64 [B].
        num_samples: draws per row.
        rounds: Philox rounds of the element words.
    """

    temperature: Tensor
    seed: Tensor
    positions: Tensor
    num_samples: int
    rounds: int

    @cached_property
    def random(self) -> Tensor:
        """bool [B, 1], False for greedy rows."""
        return safe_temperature(self.temperature.unsqueeze(1))[1]

    @cached_property
    def scale(self) -> Tensor:
        """fp32 [B, 1], log2 e / T, 1 for greedy rows."""
        safe, random = safe_temperature(self.temperature.unsqueeze(1))
        return torch.where(random, (LOG2_E / safe.double()).float(), 1.0)

    @cached_property
    def streams(self) -> list[tuple[Tensor, ...]]:
        """One row stream per sample, int64 tensors [B, 1]."""
        seed, positions = self.seed.unsqueeze(1), self.positions.unsqueeze(1)
        return [row_stream(seed, positions, sample) for sample in range(self.num_samples)]

    def select(self, index: Tensor | list[int] | slice) -> RowNoise:
        """Return the same for some of the rows."""
        chosen = replace(
            self,
            temperature=self.temperature[index],
            seed=self.seed[index],
            positions=self.positions[index],
        )
        if "streams" in vars(self):  # made by about a hundred operators, so they are not made again
            vars(chosen)["streams"] = [tuple(r[index] for r in stream) for stream in self.streams]
        return chosen


def safe_temperature(temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return temperatures with 1 for greedy rows, and whether each row is random."""
    random = temperature >= GREEDY_BELOW
    return torch.where(random, temperature, 1.0), random
