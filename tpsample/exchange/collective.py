"""One all-reduce(MAX, int64) per chunk, which works on any topology."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tpsample.exchange.base import Exchange, Setup
from tpsample.ranks.process import ProcessRanks


class CollectiveExchange(Exchange):
    """Reduces the words of a chunk in place while the next chunk is computed."""

    name = "collective"
    ranks: ProcessRanks

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._works: list[dist.Work | None] = []

    def publish(self, chunk: int, rows: int) -> None:
        words = self.words[chunk, 0, :rows]
        self._works.append(self.ranks.start_all_reduce(words, dist.ReduceOp.MAX))

    def collect(self, rows: int) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            self.ranks.wait(work, self.words)
        return super().collect(rows)

    def reset(self) -> None:
        self._works = []
        super().reset()

    def bytes_sent(self, rows: int) -> int:
        """Return 2 (W - 1) / W of the words, as a ring sends; the collective may be another."""
        world_size = self.ranks.world_size
        return 2 * (world_size - 1) * 8 * rows * self.chunks // world_size
