"""The history and bias per token id that request controls keep for one shard.

Each rank holds them for its own shard only, [slots, V/W]. Column c is id `first_id + c`, where
`first_id` is the shard's start rounded down to a multiple of four, as the kernels' tiles begin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.core.step_buffer import StepBuffer
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.batch_checks import CheckedRequest
from tpsample.request.params import MAX_LOGIT_BIAS

TOUCHED_BLOCK = 64
"""Ids per entry of `touched`; kernel tiles are powers of two."""

HAS_HISTORY, HAS_BIAS = 1, 2
"""Bits of `touched`."""


class TokenState:
    """State by slot and token id of one shard.

    Attributes:
        first_id, width: ids of the columns: [first_id, first_id + width), a multiple of 64.
        history: int32 [slots, width], 2 · occurrences in the output + (1 if in the prompt). It is
            one number, so that a penalised logit costs one load.
        bias: fp32 [slots, width], logit_bias.
        touched: int32 [slots, width / 64], bits HAS_HISTORY and HAS_BIAS, without which a tile
            skips a block.

    History and bias are [1, 1] until `reserve` makes room for them. The state outlives the call
    that makes it, so under inference mode too its tensors are ordinary ones.
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
        """Make room for what rows need, and keep what is there."""
        if history and self.history.shape[1] == 1:
            self.history = self.history.new_zeros(self._slots, self.width)
        if bias and self.bias.shape[1] == 1:
            self.bias = self.bias.new_zeros(self._slots, self.width)

    @torch.inference_mode(False)
    def load(self, slot: int, request: CheckedRequest) -> None:
        """Start a slot anew from host values; ids of other shards are passed over."""
        self.touched[slot] = 0
        if self.history.shape[1] > 1:
            row = self.history[slot].zero_()
            if request.params.repetition_scope == "all":  # no other penalty looks at the prompt
                row[self._columns(request.prompt)] = 1
            counted = torch.tensor(2, dtype=torch.int32, device=row.device)
            row.index_put_((self._columns(request.output),), counted, accumulate=True)
            self._touch(slot, row != 0, HAS_HISTORY)
        if self.bias.shape[1] > 1:
            row, biases = self.bias[slot].zero_(), request.params.logit_bias or {}
            own = [i for i in biases if self.shard.start <= i < self.shard.stop]
            values = torch.tensor([biases[i] for i in own], dtype=torch.float32)
            values.clamp_(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
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

    def mask_buffer(self, num_rows: int) -> Tensor:
        """Return uninitialised int32 [num_rows, width / 32], which the next step uses again."""
        return self._mask.take(num_rows)

    def _columns(self, ids: Sequence[int]) -> Tensor:
        columns = torch.tensor(ids, dtype=torch.int64)
        mine = (columns >= self.shard.start) & (columns < self.shard.stop)
        return (columns[mine] - self.first_id).to(self.touched.device)

    def _touch(self, slot: int, there: Tensor, bit: int) -> None:
        self.touched[slot] |= bit * there.view(-1, TOUCHED_BLOCK).any(dim=1).to(torch.int32)
