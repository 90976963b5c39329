"""The local step in plain PyTorch, tile by tile: what a CPU uses, and the kernel's twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample import word
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.score import Head, RowNoise, logits_tile, score_tile
from tpsample.step_buffer import StepBuffer
from tpsample.stored.rows import StoredRows
from tpsample.vocab_shard import VocabShard

TILE_ELEMENTS = 2**18
"""Logits per tile: 2 MB of float64, about what stays in a core's cache."""


class TorchBackend:
    """Best word per row over this rank's vocabulary rows; [B, V] is never materialised.

    Args:
        weight: [V_local, D]; rows behind the shard are never read.
        shard: the global ids of the first rows of `weight`.
        bias: [V_local] or None.
        block_v: vocabulary rows per tile; None picks by batch size. Never changes a token.
    """

    name = "torch"

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        chunks: int,
        block_v: int | None = None,
    ) -> None:
        self._weight, self._bias, self._shard = weight, bias, shard
        self._head, self._rounds, self._chunks, self._block_v = head, rounds, chunks, block_v
        self._logits = StepBuffer(len(shard), torch.float32, weight.device)

    def begin(
        self, hidden_states: Tensor, batch: SamplingBatch, positions: Tensor, num_samples: int
    ) -> None:
        """Take the inputs of a step and make the row streams; without samples it only stores."""
        self._hidden_states = hidden_states.double()
        self._rows = RowNoise.of(batch, positions, num_samples, self._rounds)
        self._batch = batch
        self._controls = None if batch.controls is None else batch.controls.step(self._shard)
        raw_and_processed = 1 if self._controls is None else 2
        self._stored = self._logits.take(raw_and_processed * len(batch.host_stored))

    def forget(self) -> None:
        """Let go of the inputs of a step."""
        for name in ("_hidden_states", "_rows", "_batch", "_controls"):
            vars(self).pop(name, None)

    def run(self, chunk: int, words: Tensor) -> None:
        """Leave the chunk's best words in `words` [num_samples · B], sample-major."""
        num_samples = self._rows.num_samples
        best = words.view(num_samples, self._hidden_states.shape[0]).zero_()
        num_rows = len(self._shard)
        first, last = (num_rows * c // self._chunks for c in (chunk, chunk + 1))
        block_v = self._block_v or max(64, TILE_ELEMENTS // self._hidden_states.shape[0])
        for start in range(first, last, block_v):
            stop = min(start + block_v, last)
            bias = None if self._bias is None else self._bias[start:stop]
            logits = logits_tile(self._hidden_states, self._weight[start:stop], bias, self._head)
            stored = self._batch.stored
            if stored is not None:
                self._stored[: len(stored), start:stop] = logits[stored]
            if self._controls is not None:
                logits = self._controls.apply(logits, self._shard.start + start)
                if stored is not None:
                    self._stored[len(stored) :, start:stop] = logits[stored]
            token_ids = torch.arange(
                self._shard.start + start, self._shard.start + stop, device=words.device
            )
            for sample in range(num_samples):
                scores = score_tile(logits, self._shard.start + start, self._rows, sample)
                tile_best = word.pack(scores, token_ids).amax(dim=1)
                torch.maximum(best[sample], tile_best, out=best[sample])

    def stored_rows(self) -> StoredRows:
        """The logits of `batch.stored`, after the last `run` of a step."""
        return StoredRows.of(self._stored, self._batch, self._rows, first_id=self._shard.start)

    def decode(self, words: Tensor, out: SampleOutput) -> None:
        """Write tokens and status of the winners of `words` [sources, num_samples · B]."""
        rows = out.status.shape[0]
        token_ids, status = word.decode(words.amax(dim=0).view(-1, rows))
        out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
        out.status.copy_(status.amax(dim=0))
