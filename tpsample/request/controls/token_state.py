"""The history and bias per token id that request controls keep for one shard.

Each rank holds them for its own shard only, [slots, V/W]. Column c is id `first_id + c`, where
`first_id` is the shard's start rounded down to a multiple of four, as the kernels' tiles begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.core.tensors import Scratch, ordinary_tensors, tensors_of
from tpsample.core.touched import HAS_BIAS, HAS_HISTORY, TOUCHED_BLOCK
from tpsample.core.vocab_shard import VocabShard
from tpsample.request.entries import Entry
from tpsample.request.params import MAX_LOGIT_BIAS

_BLOCK_SHIFT = TOUCHED_BLOCK.bit_length() - 1


class TokenState:
    """State by slot and token id of one shard.

    Attributes:
        first_id, width: ids of the columns: [first_id, first_id + width), a multiple of 64.
        history: int32 [slots, width], 2 · occurrences in the output + (1 if in the prompt). It is
            one number, so that a penalised logit costs one load.
        bias: fp32 [slots, width], logit_bias.
        touched: int32 [slots, width / 64], bits HAS_HISTORY and HAS_BIAS, without which a tile
            skips a block.

    History and bias are [1, 1] until a row needs them. The state outlives the call
    that makes it, so under inference mode too its tensors are ordinary ones.
    """

    @ordinary_tensors
    def __init__(self, shard: VocabShard, slots: int, device: torch.device) -> None:
        self.shard, self.first_id = shard, shard.start // 4 * 4
        blocks = -(-(shard.stop - self.first_id) // TOUCHED_BLOCK)
        self.width = max(1, blocks) * TOUCHED_BLOCK
        self._slots = slots
        self._two = torch.tensor([2], dtype=torch.int32, device=device)
        self._scratch = Scratch(device)
        self.history = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.bias = torch.zeros(1, 1, dtype=torch.float32, device=device)
        self.touched = torch.zeros(
            slots, self.width // TOUCHED_BLOCK, dtype=torch.int32, device=device
        )

    @ordinary_tensors
    def load(
        self, slots: Sequence[int], requests: Sequence[Entry], *, history: bool, bias: bool
    ) -> None:
        """Start some slots anew from host values; ids of other shards are passed over.

        Args:
            history, bias: whether a row ever needed them, so that there is room for all rows.
        """
        if history and self.history.shape[1] == 1:
            self.history = self.history.new_zeros(self._slots, self.width)
        if bias and self.bias.shape[1] == 1:
            self.bias = self.bias.new_zeros(self._slots, self.width)
        dense = [table for table in (self.history, self.bias) if table.shape[1] > 1]
        if not dense:
            return
        for slot in slots:
            for table in (*dense, self.touched):
                table[slot].zero_()
        if self.history.shape[1] > 1:
            # Nothing looks at the tokens of a row without penalties, and only one at its prompt.
            prompts, outputs = [], []
            for request in requests:
                in_prompt = request.params.penalised and request.params.repetition_scope == "all"
                prompts.append(request.prompt if in_prompt else ())
                outputs.append(request.output if request.params.penalised else ())
            counts = self.history.view(-1)
            if any(prompts):
                counts.index_fill_(0, self._addresses(slots, prompts, HAS_HISTORY), 1)
            if any(outputs):
                made = self._addresses(slots, outputs, HAS_HISTORY)
                counts.index_add_(0, made, self._two.expand(len(made)))
        start, stop = self.shard.start, self.shard.stop
        biases = [request.params.logit_bias or {} for request in requests]
        own = [[i for i in row_bias if start <= i < stop] for row_bias in biases]
        if any(own):
            values = [row_bias[i] for row_bias, ids in zip(biases, own, strict=True) for i in ids]
            (clamped,) = tensors_of(values, device=None, dtype=torch.float32)
            clamped.clamp_(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
            biased = self._addresses(slots, own, HAS_BIAS)
            self.bias.view(-1).index_copy_(0, biased, self._scratch.send("biases", clamped))

    def append(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count one output token per slot, int64 [B] each, on the device. Only a slot that nothing
        reads may be named twice."""
        if self.history.shape[1] == 1 or not len(self.shard):
            return
        take, rows = self._scratch.take, len(slots)
        # The id if it is of this shard, else another of the shard, which is counted 0 times.
        first, last = self.shard.start, self.shard.stop - 1
        columns = torch.clamp(token_ids, first, last, out=take("columns", torch.int64, rows))
        mine = torch.eq(columns, token_ids, out=take("mine", torch.int32, rows))
        columns.sub_(self.first_id)
        address = torch.mul(slots, self.width, out=take("place", torch.int64, rows)).add_(columns)
        self.history.view(-1).index_add_(0, address, mine, alpha=2)
        self._touch(address.bitwise_right_shift_(_BLOCK_SHIFT), mine.mul_(HAS_HISTORY))

    def mask_buffer(self, num_rows: int) -> Tensor:
        """Return uninitialised int32 [num_rows, width / 32], which the next step uses again."""
        return self._scratch.take("mask", torch.int32, num_rows, self.width // 32)

    def _addresses(self, slots: Sequence[int], ids: Sequence[Sequence[int]], bit: int) -> Tensor:
        """Return where the ids of slots that are of this shard lie in [slots · width]: int64 [n] on
        the device. Note in `touched` that something is known of these ids."""
        listed, of_slot, lengths = tensors_of(
            itertools.chain(*ids), slots, map(len, ids), device=None
        )
        mine = (listed >= self.shard.start) & (listed < self.shard.stop)
        row = of_slot.repeat_interleave(lengths)[mine]
        addresses = row * self.width + listed[mine] - self.first_id
        self._touch(self._scratch.send("blocks", addresses >> _BLOCK_SHIFT), bit)
        return self._scratch.send("places", addresses)

    def _touch(self, block: Tensor, bits: Tensor | int) -> None:
        """Add bits to places of [slots · width / 64], int64 [n]. One that is named more than once
        is given the same bits, or nothing reads it."""
        touched = self.touched.view(-1)
        touched.index_copy_(0, block, self._scratch.pick("bits", touched, block).bitwise_or_(bits))
