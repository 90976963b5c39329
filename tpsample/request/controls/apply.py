"""Penalties, biases and masks applied to logits. Twin: `tpsample.kernels.controls`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core.vocab_shard import VocabShard
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.token_mask import build_mask
from tpsample.request.controls.token_state import TokenState


@dataclass(frozen=True)
class StepControls:
    """The controls of a step's rows over one shard, with the shard's state.

    Attributes:
        mask: int32 [B, width / 32], the ids a row may draw in this step; None if it may draw all.
    """

    rows: ControlRows
    state: TokenState
    mask: Tensor | None

    @staticmethod
    def of(
        rows: ControlRows,
        shard: VocabShard,
        make_mask: Callable[[ControlRows, TokenState], Tensor] = build_mask,
    ) -> StepControls:
        """Find the controls of some rows over a shard; errors are those of `ControlTables.state`.

        Args:
            make_mask: `build_mask`, or its kernel.
        """
        state = rows.tables.state(shard)
        return StepControls(rows, state, make_mask(rows, state) if rows.masked else None)

    def apply(self, logits: Tensor, first_id: int) -> Tensor:
        """Process fp32 logits [B, n] of the ids from `first_id` on, all of this shard."""
        columns = self._columns(first_id, logits.shape[1])
        slots, tables = self.rows.slots, self.rows.tables
        return self._change(
            logits,
            None if self.mask is None else self._allowed(columns),
            self.state.bias[slots, columns] if tables.has_bias else None,
            self._history(columns, first_id) if tables.has_penalties else None,
            tables.penalties[slots].unsqueeze(1),
        )

    @staticmethod
    def _change(
        logits: Tensor,
        allowed: Tensor | None,
        bias: Tensor | None,
        history: Tensor | None,
        penalties: Tensor,
    ) -> Tensor:
        """Process logits of any shape; `penalties` is [..., 3]."""
        if allowed is not None:
            logits = torch.where(allowed, logits, -torch.inf)
        if bias is not None:
            logits = logits + bias
        if history is not None:
            repetition, frequency, presence = penalties.unbind(dim=-1)
            scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(history != 0, scaled, logits)
            count = history >> 1
            logits = logits - frequency * count
            logits = logits - presence * (count > 0)
        return logits

    def _columns(self, first_id: int, num_ids: int) -> slice:
        start = first_id - self.state.first_id
        return slice(start, start + num_ids)

    def _allowed(self, columns: slice) -> Tensor:
        assert self.mask is not None
        column = torch.arange(columns.start, columns.stop, device=self.mask.device)
        return (self.mask[:, column >> 5] >> (column & 31)) & 1 != 0

    def _history(self, columns: slice, first_id: int) -> Tensor:
        history = self.state.history[self.rows.slots, columns]
        drafts, num_drafts = self.rows.drafts, self.rows.num_drafts
        if drafts is None or num_drafts is None:
            return history
        ids = torch.arange(first_id, first_id + history.shape[1], device=history.device)
        for k in range(drafts.shape[1]):
            counted = (drafts[:, k] == ids[:, None]) & (k < num_drafts)
            history = history + 2 * counted.T.to(torch.int32)
        return history
