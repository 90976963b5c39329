"""Point to point: the words of a chunk travel by send/recv while the next chunk is computed.

NCCL runs each batch on the process group's own stream. It waits for the words of its chunk and not
for later chunks, and `wait()` makes the compute stream wait, not the host.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tpsample.exchange.base import Exchange, Setup
from tpsample.ranks.process import ProcessRanks


class P2PExchange(Exchange):
    """Sends this rank's words of every chunk to every other rank."""

    name = "p2p"
    ranks: ProcessRanks

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, sources=setup.ranks.world_size)
        self.own = setup.ranks.rank
        self._works: list[dist.Work] = []

    def publish(self, chunk: int, rows: int) -> None:
        self._works += self.ranks.start_sends(self.words[chunk, :, :rows], chunk)

    def collect(self, rows: int) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return super().collect(rows)

    def reset(self) -> None:
        self._works = []
        super().reset()

    def bytes_sent(self, rows: int) -> int:
        return (self.ranks.world_size - 1) * 8 * rows * self.chunks
