"""The local step in plain PyTorch, tile by tile, by the definition: the kernel's twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.backend import Backend
from tpsample.core import word
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import logits_tile, score_tile
from tpsample.request.step import Push, Step, raw_and_processed

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
        rows, plan = step.batch.rows, step.batch.plan
        # A filtered row has no word here, because its filters make it of the stored logits.
        drawn = slice(None) if plan.drawn is None else plan.drawn
        best = words.view(step.noise.num_samples, rows)
        noise, drawn_best = step.noise.select(drawn), best[:, drawn]
        for start, stop in self.tiles(rows, part, parts):
            raw, processed = self.tile_logits(step, start, stop)
            self.raise_best(drawn_best, processed[drawn], start, noise)
            if plan.stored_index is not None:
                assert step.logits is not None
                memory = raw_and_processed(step.logits, len(plan.stored_index))
                for half, logits in zip(memory, (raw, processed), strict=True):
                    if len(half):
                        half[:, start:stop] = logits[plan.stored_index]
        best[:, drawn] = drawn_best

    def tiles(self, batch_rows: int, part: int, parts: int) -> list[tuple[int, int]]:
        """Return where the tiles of a part begin and end, as rows of the weight."""
        num_rows = len(self._shard)
        first, last = (num_rows * p // parts for p in (part, part + 1))
        block_v = self.block_v or max(64, TILE_ELEMENTS // max(1, batch_rows))
        return [(start, min(start + block_v, last)) for start in range(first, last, block_v)]

    def tile_logits(self, step: Step, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return fp32 [B, n] each, a tile's logits before the request controls and behind them."""
        first_id = self._shard.start + start
        if step.local_logits is not None:
            raw = step.local_logits[:, start:stop].float()
        else:
            bias = None if self._bias is None else self._bias[start:stop]
            raw = logits_tile(step.hidden_double, self._weight[start:stop], bias, self._head)
        return raw, raw if step.controls is None else step.controls.apply(raw, first_id)

    def raise_best(self, best: Tensor, logits: Tensor, start: int, noise: RowNoise) -> None:
        """Raise `best`, int64 [num_samples, B], to the best words of a tile's logits, [B, n]."""
        if not best.numel():
            return
        first_id = self._shard.start + start
        token_ids = torch.arange(first_id, first_id + logits.shape[1], device=best.device)
        for sample, best_of in enumerate(best):
            scores = score_tile(logits, first_id, noise, sample)
            torch.maximum(best_of, word.pack(scores, token_ids).amax(dim=1), out=best_of)
