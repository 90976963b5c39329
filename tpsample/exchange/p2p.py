"""Point to point: the words of a chunk travel by send/recv while the next chunk is computed.

On GPUs NCCL runs each batch on the process group's own stream: it waits for the words of its
chunk, not for later chunks, and `wait()` makes the compute stream wait, not the host. On CPUs
gloo's threads carry the words. Same code.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.exchange.base import Exchange
from tpsample.exchange.ranks import ProcessRanks, Ranks


class P2PExchange(Exchange):
    """Every rank sends its words of every chunk to every other rank."""

    name = "p2p"
    ranks: ProcessRanks

    def __init__(self, ranks: Ranks, max_rows: int, chunks: int, device: torch.device) -> None:
        super().__init__(ranks, max_rows, chunks, device, sources=ranks.world_size)
        self.own = ranks.rank
        group = ranks.group
        assert group is not None
        self._peers = [
            (peer, dist.get_global_rank(group, peer))
            for peer in range(ranks.world_size)
            if peer != ranks.rank
        ]
        self._works: list[dist.Work] = []

    def publish(self, chunk: int, rows: int) -> None:
        group, words = self.ranks.group, self.words[chunk, :, :rows]
        receives = [
            dist.P2POp(dist.irecv, words[peer], global_rank, group, tag=chunk)
            for peer, global_rank in self._peers
        ]
        sends = [
            dist.P2POp(dist.isend, words[self.own], global_rank, group, tag=chunk)
            for _, global_rank in self._peers
        ]
        with self.ranks.roll.called_on_error():
            self._works += dist.batch_isend_irecv(receives + sends)

    def collect(self, rows: int) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            self.ranks.wait(work, self.words, sliced=False)
        return super().collect(rows)

    def reset(self) -> None:
        self._works = []
        super().reset()

    def bytes_sent(self, rows: int) -> int:
        return len(self._peers) * 8 * rows * self.chunks
