"""The local step in plain PyTorch, tile by tile: what a CPU uses, and the kernel's twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import Head, RowNoise, logits_tile, score_tile
from tpsample.core.step_buffer import StepBuffer
from tpsample.core.vocab_shard import VocabShard
from tpsample.logits.shard_logits import StoredRows
from tpsample.output import SampleOutput
from tpsample.request.plan import BatchView
from tpsample.request.step import LocalStep

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
        self, hidden_states: Tensor, batch: BatchView, positions: Tensor, num_samples: int
    ) -> LocalStep:
        """The step of these inputs; without samples it only stores logits."""
        controls = None if batch.controls is None else batch.controls.step(self._shard)
        logits = None
        if batch.plan.stored is not None:
            raw_and_processed = 1 if controls is None else 2
            logits = self._logits.take(raw_and_processed * len(batch.plan.host_stored))
        noise = RowNoise.of(batch, positions, num_samples, self._rounds)
        return LocalStep(hidden_states.double(), batch, noise, controls, logits)

    def run(self, step: LocalStep, chunk: int, words: Tensor) -> None:
        """Leave the chunk's best words in `words` [num_samples · B], sample-major."""
        num_samples, hidden_states = step.noise.num_samples, step.hidden_states
        best = words.view(num_samples, hidden_states.shape[0]).zero_()
        num_rows = len(self._shard)
        first, last = (num_rows * c // self._chunks for c in (chunk, chunk + 1))
        block_v = self._block_v or max(64, TILE_ELEMENTS // hidden_states.shape[0])
        for start in range(first, last, block_v):
            stop = min(start + block_v, last)
            bias = None if self._bias is None else self._bias[start:stop]
            logits = logits_tile(hidden_states, self._weight[start:stop], bias, self._head)
            stored = step.batch.plan.stored
            if step.logits is not None and stored is not None:
                step.logits[: len(stored), start:stop] = logits[stored]
            if step.controls is not None:
                logits = step.controls.apply(logits, self._shard.start + start)
                if step.logits is not None and stored is not None:
                    step.logits[len(stored) :, start:stop] = logits[stored]
            token_ids = torch.arange(
                self._shard.start + start, self._shard.start + stop, device=words.device
            )
            for sample in range(num_samples):
                scores = score_tile(logits, self._shard.start + start, step.noise, sample)
                tile_best = word.pack(scores, token_ids).amax(dim=1)
                torch.maximum(best[sample], tile_best, out=best[sample])

    def stored_rows(self, step: LocalStep) -> StoredRows:
        """The logits of `batch.plan.stored`, after the last `run` of a step."""
        assert step.logits is not None
        return StoredRows.of(step.logits, step.batch, step.noise, first_id=self._shard.start)

    def decode(self, words: Tensor, seeds: Tensor, out: SampleOutput) -> None:
        """Write tokens, status and seeds of the winners of `words` [sources, num_samples · B]."""
        out.seeds.copy_(seeds)
        rows = out.status.shape[0]
        token_ids, status = word.decode(words.amax(dim=0).view(-1, rows))
        out.token_ids.copy_(token_ids.T.reshape(out.token_ids.shape))
        out.status.copy_(status.amax(dim=0))
