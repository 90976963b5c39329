"""The history and bias per token id that request controls keep for one shard.

Each rank holds them for its own shard only, [slots, V/W]. Column c is id `first_id + c`, where
`first_id` is the shard's start rounded down to a multiple of four, as the kernels' tiles begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.core.host_tensors import integers
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
    def load(self, slots: Sequence[int], requests: Sequence[CheckedRequest]) -> None:
        """Start some slots anew from host values; ids of other shards are passed over."""
        (index,) = integers(slots, device=self.touched.device)
        self.touched[index] = 0
        if self.history.shape[1] > 1:
            self.history[index] = 0
            # Nothing looks at the tokens of a row without penalties, and only one at its prompt.
            penalised = [each.params.penalised for each in requests]
            at_prompt = [each.params.repetition_scope == "all" for each in requests]
            its = zip(requests, penalised, at_prompt, strict=True)
            prompts = [each.prompt if counts and all_ else () for each, counts, all_ in its]
            its_output = zip(requests, penalised, strict=True)
            outputs = [each.output if counts else () for each, counts in its_output]
            if (places := self._places(slots, prompts, HAS_HISTORY)) is not None:
                self.history[places] = 1
            if (places := self._places(slots, outputs, HAS_HISTORY)) is not None:
                counted = torch.tensor(2, dtype=torch.int32, device=index.device)
                self.history.index_put_(places, counted, accumulate=True)
        if self.bias.shape[1] > 1:
            self.bias[index] = 0
            start, stop = self.shard.start, self.shard.stop
            biases = [each.params.logit_bias or {} for each in requests]
            own = [[i for i in each if start <= i < stop] for each in biases]
            if (places := self._places(slots, own, HAS_BIAS)) is not None:
                values = [each[i] for each, ids in zip(biases, own, strict=True) for i in ids]
                clamped = torch.tensor(values, dtype=torch.float32)
                self.bias[places] = clamped.clamp_(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).to(index.device)

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

    def _places(
        self, slots: Sequence[int], ids: Sequence[Sequence[int]], bit: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return slot and column, int64 [n] each, of each slot's ids that are of this shard, and
        note in `touched` that something is known of them. None without any."""
        if not any(ids):
            return None
        (listed,) = integers(itertools.chain(*ids), device=None)
        of_slot, lengths = integers(slots, map(len, ids), device=None)
        mine = (listed >= self.shard.start) & (listed < self.shard.stop)
        columns = (listed[mine] - self.first_id).to(self.touched.device)
        slot = of_slot.repeat_interleave(lengths)[mine].to(self.touched.device)
        # A block may be named more than once, always with the same result.
        self.touched[slot, columns // TOUCHED_BLOCK] |= bit
        return slot, columns
