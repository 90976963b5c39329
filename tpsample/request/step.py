"""A step between its stages: what one stage hands to the next, instead of leaving it in a field."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tpsample.core.score import RowNoise
from tpsample.output import SampleOutput
from tpsample.request.controls.token_state import StepControls
from tpsample.request.plan import BatchView


@dataclass(frozen=True)
class LocalStep:
    """A step on one rank, as its backend began it.

    Attributes:
        hidden_states: [B, D], as the backend multiplies them.
        batch: its rows.
        noise: what their scores need.
        controls: their controls over the shard; None if there are none.
        logits: fp32 [R or 2 R, V_local], memory for the logits of `batch.plan.stored`, the raw ones
            first; None if there are none.
    """

    hidden_states: Tensor
    batch: BatchView
    noise: RowNoise
    controls: StepControls | None
    logits: Tensor | None


@dataclass(frozen=True)
class Step:
    """A step whose words are on their way to the other ranks.

    Attributes:
        batch: its rows.
        positions: int64 [B].
        out: what it will return.
        local: None if there are no rows.
    """

    batch: BatchView
    positions: Tensor
    out: SampleOutput
    local: LocalStep | None
