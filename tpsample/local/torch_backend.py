"""The local step in plain PyTorch, tile by tile, by the definition: the kernel's twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import logits_tile, score_tile
from tpsample.local.backend import Backend
from tpsample.request.step import Push, Step, StepRows

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
        rows, stored = step.rows, step.batch.plan.stored_index
        best = words.view(step.noise.num_samples, len(rows))
        for start, stop in self.tiles(len(rows), part, parts):
            raw, processed = self.full_tile(rows, start, stop, best)
            if stored is not None:
                self.store(step, slice(0, len(stored)), start, raw[stored], processed[stored])
            self.count_whole(step, stop - start)

    def tiles(self, batch_rows: int, part: int, parts: int) -> list[tuple[int, int]]:
        """Return where the tiles of a part begin and end, as rows of the weight."""
        num_rows = len(self._shard)
        first, last = (num_rows * p // parts for p in (part, part + 1))
        block_v = self.block_v or max(64, TILE_ELEMENTS // max(1, batch_rows))
        return [(start, min(start + block_v, last)) for start in range(first, last, block_v)]

    @staticmethod
    def store(
        step: Step, places: slice | Tensor, start: int, raw: Tensor, processed: Tensor
    ) -> None:
        """Keep the logits of a tile, fp32 [b, n] each, from column `start` on.

        Args:
            places: where the rows are among the stored ones.
        """
        memory, columns = step.logits, slice(start, start + raw.shape[1])
        assert memory is not None
        memory[places, columns] = raw
        if step.controls is not None:
            memory[len(step.batch.plan.stored_list) :][places, columns] = processed

    def full_tile(
        self, rows: StepRows, start: int, stop: int, best: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Raise `best` to the best words of a tile, all of whose scores are computed.

        Args:
            best: int64 [num_samples, B], of no sample if only the logits are wanted.

        Returns:
            fp32 [B, n] each, the logits before the request controls and behind them.
        """
        first_id = self._shard.start + start
        if rows.local_logits is not None:
            logits = rows.local_logits[:, start:stop].float()
        else:
            bias = None if self._bias is None else self._bias[start:stop]
            logits = logits_tile(rows.hidden_double, self._weight[start:stop], bias, self._head)
        raw = logits
        if rows.controls is not None:
            logits = rows.controls.apply(raw, first_id)
        token_ids = torch.arange(first_id, self._shard.start + stop, device=best.device)
        for sample, best_of in enumerate(best):
            scores = score_tile(logits, first_id, rows.noise, sample)
            torch.maximum(best_of, word.pack(scores, token_ids).amax(dim=1), out=best_of)
        return raw, logits
