"""The exchanges on GPUs by collectives of torch, which send a chunk while the next is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.errors import RankMismatch
from tpsample.exchange.base import Exchange
from tpsample.ranks.process import ProcessRanks
from tpsample.ranks.ranks import Ranks
from tpsample.settings import Settings


class QueuedExchange(Exchange):
    """Exchanges whose messages torch sends while the next chunk is computed."""

    ranks: ProcessRanks

    def __init__(self, settings: Settings, sources: int = 1) -> None:
        super().__init__(settings, sources)
        self._works: list[dist.Work | None] = []

    def collect(self, rows: int) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            self._wait(work)
        return super().collect(rows)

    def _wait(self, work: dist.Work | None) -> None:
        """Let what follows come behind a message."""
        raise NotImplementedError

    def reset(self) -> None:
        self._works = []
        super().reset()


class CollectiveExchange(QueuedExchange):
    """One all-reduce(MAX, int64) per chunk, in place, which works on any topology.

    With two levels it is one inside the host, and then one of all chunks between hosts.
    `PeerExchange` takes its place where kernels can write to the peers of their host.
    """

    levels: Sequence[ProcessRanks]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._best = torch.zeros_like(self.words[0, 0])
        for level in self.levels:
            require_maximum(level, settings.device)

    def publish(self, chunk: int, rows: int) -> None:
        words = self._views[rows][0][chunk]
        self._works.append(self.levels[0].start_all_reduce(words, dist.ReduceOp.MAX))

    def collect(self, rows: int) -> Tensor:
        words = super().collect(rows)
        for level in self.levels[1:]:
            if self.chunks > 1:
                torch.amax(words, dim=0, out=self._best[:rows])
                words[0].copy_(self._best[:rows])
            level.all_reduce(words[0], dist.ReduceOp.MAX)
        return words

    def _wait(self, work: dist.Work | None) -> None:
        self.ranks.wait(work, self.words)

    def bytes_sent(self, rows: int) -> int:
        words = [rows * self.chunks, rows]
        return sum(ring_bytes(*pair) for pair in zip(self.levels, words, strict=False))


def require_maximum(ranks: Ranks, device: torch.device) -> None:
    """Raise if an all-reduce does not return the largest integers. Collective; waits for the GPU.

    A library was seen that returns sums of integers where maxima are asked for.

    Raises:
        RankMismatch: every rank raises it, and says what came.
    """

    def words_of(rank: int) -> list[int]:
        return [(1 << 62) + rank, ranks.world_size - rank]

    expected = [max(words) for words in zip(*map(words_of, range(ranks.world_size)), strict=True)]
    words = torch.tensor(words_of(ranks.rank), device=device)
    ranks.all_reduce(words, dist.ReduceOp.MAX)
    if words.tolist() != expected:
        raise RankMismatch(
            f"exchange: an all-reduce(MAX) of int64 should return {expected}, this library "
            f'returned {words.tolist()}; pass exchange="p2p", or install another build of it'
        )


def ring_bytes(ranks: Ranks, words: int) -> int:
    """Return 2 (W - 1) / W of the words, as a ring sends; the collective may be another."""
    return 2 * (ranks.world_size - 1) * 8 * words // ranks.world_size


class P2PExchange(QueuedExchange):
    """Sends this rank's words of every chunk to every other rank by send/recv.

    NCCL runs each batch on the process group's own stream. It waits for the words of its chunk and
    not for later chunks, and `wait()` makes the compute stream wait, not the host.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, sources=settings.ranks.world_size)
        self.own = settings.ranks.rank

    def publish(self, chunk: int, rows: int) -> None:
        self._works += self.ranks.start_sends(self.words[chunk, :, :rows], chunk)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait()  # on gloo a wait that ends before a message comes would end the connection

    def bytes_sent(self, rows: int) -> int:
        return (self.ranks.world_size - 1) * 8 * rows * self.chunks
