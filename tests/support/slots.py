"""A small head for tests of slots, and its sampler."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.virtual import SMALL_TILE
from tpsample import LMHeadSampler

V, D = 67, 8
WEIGHT = 2 * torch.randn(V, D, generator=torch.Generator().manual_seed(5))


def sampler_of(backend: str = "torch", **options: Any) -> LMHeadSampler:
    """One rank alone."""
    sampler = LMHeadSampler(WEIGHT, backend=backend, max_rows=64, **options)
    if backend == "triton":
        local: Any = sampler.local
        local.tile = SMALL_TILE
    return sampler
