"""One row per position to verify: what a batch of B requests becomes for B · (K + 1) rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsample.batch import SamplingBatch


def expand_rows(batch: SamplingBatch, draft_token_ids: Tensor) -> SamplingBatch:
    """Row r · (K + 1) + i is row r at its i-th position, the first i drafts behind it.

    Args:
        batch: B rows, each with a seed.
        draft_token_ids: int64 [B, K].
    """
    width = draft_token_ids.shape[1] + 1
    filters, logprobs = batch.filters, batch.logprobs
    if filters is not None:
        rows = _places(filters.host_rows, width)
        repeated = {name: _repeat(value, width) for name, value in vars(filters).items()}
        repeated |= {"rows": torch.tensor(rows, device=batch.device), "host_rows": rows}
        filters = replace(filters, **repeated)
    if logprobs is not None:
        repeated = {name: _repeat(value, width) for name, value in vars(logprobs).items()}
        logprobs = replace(logprobs, **(repeated | {"rows": _places(logprobs.rows, width)}))
    return SamplingBatch(
        batch.temperature.repeat_interleave(width),
        batch.seed.repeat_interleave(width),
        vocab_size=batch.vocab_size,
        filters=filters,
        logprobs=logprobs,
    )


def storing_every_row(batch: SamplingBatch) -> SamplingBatch:
    """The same rows; a step keeps the logits of all of them on their ranks, in order."""
    stored = copy.copy(batch)
    stored.host_stored = list(range(batch.rows))
    stored.stored = torch.arange(batch.rows, device=batch.device)
    stored.stored_slot = stored.stored.to(torch.int32)
    return stored


def position_of_rows(positions: Tensor, width: int) -> Tensor:
    """int64 [B · width]: the absolute positions of the expanded rows."""
    index = torch.arange(width, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()


def _places(rows: list[int], width: int) -> list[int]:
    return [row * width + i for row in rows for i in range(width)]


def _repeat(value: Any, width: int) -> Any:
    if isinstance(value, Tensor):
        return value.repeat_interleave(width, dim=0)
    if isinstance(value, list):
        return [each for each in value for _ in range(width)]
    return value
