"""SampleOutput: what a step returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SampleOutput:
    """Tokens of one step, the same on every rank.

    Attributes:
        token_ids: int64 [B], or [B, num_samples] if num_samples was given; -1 where status is
            not OK, else a global id below vocab_size.
        status: int32 [B], values of `tpsample.Status`; the worst over a row's samples.
        seeds: int64 [B], the seed of each row, drawn or given (bits above 2^63 show as sign).
        logprobs: None unless asked for.
    """

    token_ids: Tensor
    status: Tensor
    seeds: Tensor
    logprobs: None = None

    @staticmethod
    def empty(seeds: Tensor, num_samples: int | None) -> SampleOutput:
        """Uninitialised output for one row per seed."""
        rows = seeds.shape[0]
        shape = (rows,) if num_samples is None else (rows, num_samples)
        return SampleOutput(
            token_ids=torch.empty(shape, dtype=torch.int64, device=seeds.device),
            status=torch.empty(rows, dtype=torch.int32, device=seeds.device),
            seeds=seeds,
        )
