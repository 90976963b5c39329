"""A head of 29 ids whose products tie, and plain requests."""

from __future__ import annotations

from typing import Any

import torch

from tpsample import SamplingParams

V, D = 29, 4
BACKENDS = ("torch", "triton")


def head(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [rows, D] and a weight [V, D]."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(V, D, generator=generator).round()
    return torch.randn(rows, D, generator=generator).round(), weight


def plain(rows: int, **params: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=row, **params) for row in range(rows)]
