"""One row per position to verify: what a batch of B requests becomes for B · (K + 1) rows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from tpsample.request.batch import SamplingBatch
from tpsample.stored.logprob_rows import AskingRows


def storing_every_row(batch: SamplingBatch) -> SamplingBatch:
    """The same rows; a step keeps the logits of all of them on their ranks, in order."""
    stored = copy.copy(batch)
    stored.host_stored = list(range(batch.rows))
    stored.stored = torch.arange(batch.rows, device=batch.device)
    stored.stored_slot = stored.stored.to(torch.int32)
    if batch.logprobs is not None:
        stored.asking = AskingRows.of(batch.logprobs, batch.filters, stored.host_stored)
    return stored


def position_of_rows(positions: Tensor, width: int) -> Tensor:
    """int64 [B · width]: the absolute positions of the expanded rows."""
    index = torch.arange(width, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()
