"""The local step in plain PyTorch, tile by tile: what a CPU uses, and the kernel's twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import logits_tile, score_tile
from tpsample.local.backend import Backend
from tpsample.request.step import Push, Step

TILE_ELEMENTS = 2**18
"""Logits per tile: 2 MB of float64, about what stays in a core's cache."""


class TorchBackend(Backend):
    """The words in plain PyTorch, one tile of the vocabulary after the other.

    Attributes:
        block_v: vocabulary rows per tile; None picks by batch size. It never changes a token.
    """

    block_v: int | None = None

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        assert push is None, "plain PyTorch writes to no peer"
        num_samples, hidden_states = step.noise.num_samples, step.hidden_states.double()
        best = words.view(num_samples, hidden_states.shape[0])
        num_rows = len(self._shard)
        first, last = (num_rows * p // parts for p in (part, part + 1))
        block_v = self.block_v or max(64, TILE_ELEMENTS // hidden_states.shape[0])
        for start in range(first, last, block_v):
            stop = min(start + block_v, last)
            if step.local_logits is not None:
                logits = step.local_logits[:, start:stop].float()
            else:
                bias = None if self._bias is None else self._bias[start:stop]
                logits = logits_tile(hidden_states, self._weight[start:stop], bias, self._head)
            stored = step.batch.plan.stored_index
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
