"""A small head for tests of slots, and its sampler."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from tests.support.virtual import small_tiles
from tpsample import LMHeadSampler

GPU = patch("tpsample.core.tensors.READ_ON", ())
"""The host reads nothing of the device, as on a GPU."""
V, D = 67, 8
WEIGHT = 2 * torch.randn(V, D, generator=torch.Generator().manual_seed(5))


def sampler_of(backend: str = "torch", **options: Any) -> LMHeadSampler:
    """One rank alone."""
    return small_tiles(LMHeadSampler(WEIGHT, backend=backend, max_rows=64, **options))
