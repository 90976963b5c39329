"""What request controls keep per token id: one shard's history and bias.

Each rank holds this for its own shard only, [slots, V/W]. Column c is id `first_id + c`, where
`first_id` is the shard's start rounded down to a multiple of four, as the kernels' tiles begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tpsample.core.step_buffer import StepBuffer
from tpsample.core.vocab_shard import VocabShard

TOUCHED_BLOCK = 64
"""Ids per entry of `touched`; kernel tiles are powers of two."""

HAS_HISTORY, HAS_BIAS = 1, 2
"""Bits of `touched`."""


class TokenState:
    """State by slot and token id of one shard.

    Attributes:
        first_id, width: ids of the columns: [first_id, first_id + width), a multiple of 64.
        history: int32 [slots, width], 2 · occurrences in the output + (1 if in the prompt);
            one number, so that a penalised logit costs one load.
        bias: fp32 [slots, width], logit_bias.
        touched: int32 [slots, width / 64], HAS_HISTORY and HAS_BIAS: what a tile may skip.
        Each is [1, …] until `reserve` is told that a row needs it.

    It outlives the call that makes it, so its tensors are ordinary ones under inference mode too.
    """

    @torch.inference_mode(False)
    def __init__(self, shard: VocabShard, slots: int, device: torch.device) -> None:
        self.shard, self.first_id = shard, shard.start // 4 * 4
        blocks = -(-(shard.stop - self.first_id) // TOUCHED_BLOCK)
        self.width = max(1, blocks) * TOUCHED_BLOCK
        self._slots, self._mask = slots, StepBuffer(self.width // 32, torch.int32, device)
        self.history = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.bias = torch.zeros(1, 1, dtype=torch.float32, device=device)
        self.touched = torch.zeros(
            slots, self.width // TOUCHED_BLOCK, dtype=torch.int32, device=device
        )

    @torch.inference_mode(False)
    def reserve(self, *, history: bool, bias: bool) -> None:
        """Make room for what rows need; what is there stays."""
        if history and self.history.shape[1] == 1:
            self.history = self.history.new_zeros(self._slots, self.width)
        if bias and self.bias.shape[1] == 1:
            self.bias = self.bias.new_zeros(self._slots, self.width)

    def load(
        self,
        slot: int,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        bias: Mapping[int, float],
    ) -> None:
        """Start a slot anew, from host values; ids of other shards are passed over."""
        self.touched[slot] = 0
        if self.history.shape[1] > 1:
            row = self.history[slot].zero_()
            row[self._columns(prompt)] = 1
            counted = torch.tensor(2, dtype=torch.int32, device=row.device)
            row.index_put_((self._columns(output),), counted, accumulate=True)
            self._touch(slot, row != 0, HAS_HISTORY)
        if self.bias.shape[1] > 1:
            row = self.bias[slot].zero_()
            own = [token_id for token_id in bias if self.shard.start <= token_id < self.shard.stop]
            values = torch.tensor([bias[i] for i in own], dtype=torch.float32)
            row[self._columns(own)] = values.to(row.device)
            self._touch(slot, row != 0, HAS_BIAS)

    def append(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count one output token per row, int64 [B], on the device; -1 is none."""
        if self.history.shape[1] == 1:
            return
        mine = (token_ids >= self.shard.start) & (token_ids < self.shard.stop)
        columns = (token_ids - self.first_id).where(mine, 0)
        self.history[slots, columns] += 2 * mine.to(torch.int32)
        self.touched[slots, columns // TOUCHED_BLOCK] |= HAS_HISTORY * mine.to(torch.int32)

    def mask_buffer(self, rows: int) -> Tensor:
        """Uninitialised int32 [rows, width / 32], used again by the next step."""
        return self._mask.take(rows)

    def nbytes(self) -> int:
        """Bytes of state on this rank."""
        kept = (self.history, self.bias, self.touched, self._mask)
        return sum(memory.nbytes for memory in kept)

    def _columns(self, ids: Sequence[int]) -> Tensor:
        columns = torch.tensor(ids, dtype=torch.int64)
        mine = (columns >= self.shard.start) & (columns < self.shard.stop)
        return (columns[mine] - self.first_id).to(self.touched.device)

    def _touch(self, slot: int, there: Tensor, bit: int) -> None:
        self.touched[slot] |= bit * there.view(-1, TOUCHED_BLOCK).any(dim=1).to(torch.int32)
