"""The settings of a sampler: its checked arguments and what follows from them, in one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from tpsample.core.checks import describe
from tpsample.core.row_noise import SeedSource
from tpsample.core.score import Head
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.ranks.ranks import Ranks

ChosenBackend = Literal["triton", "numba", "torch"]


@dataclass(frozen=True)
class Settings:
    """The settings of a sampler. Ranks differ in rank, shard, tensors and screening.

    Attributes:
        ranks: the ranks that take part.
        weight: [V_local, D], an alias of the caller's tensor that requires no gradient.
        vocab_size, shard: V, and the global ids of this rank's rows.
        backend: the backend that was chosen.
        exchange: the exchange that was chosen, by a name that `make_exchange` knows.
        may_fall_back: whether "collective" takes the place of a "peer" that cannot be set up.
        hosts: name of the host of each rank, in rank order.
        overlap: whether kernels may overlap (`tpsample.core.machine`).
        seeds: the source of seeds for rows without one.
        bias: [V_local], an alias as the weight is; None if there is none.

    The other attributes are arguments of `LMHeadSampler`.
    """

    ranks: Ranks
    weight: Tensor
    vocab_size: int
    shard: VocabShard
    backend: ChosenBackend = "torch"
    exchange: str = "none"
    may_fall_back: bool = False
    hosts: Sequence[str] = ()
    overlap: bool = False
    seeds: SeedSource = field(default_factory=SeedSource)
    bias: Tensor | None = None
    head: Head = field(default_factory=Head)
    max_rows: int = 256
    chunks: int = 1
    screening: str | None = None
    on_failed: int = NO_TOKEN

    @cached_property
    def device(self) -> torch.device:
        """Where a step's tensors are."""
        return self.weight.device


def require_sampler(value: object, expected: str = "an LMHeadSampler") -> None:
    """Raise a TypeError for anything but a sampler. No other rank is told of it."""
    if not isinstance(getattr(value, "settings", None), Settings):
        raise TypeError(f"sampler: expected {expected}, got {describe(value)}")
