"""The exchanges on GPUs by collectives of torch, which send a chunk while the next is computed.

With two levels, for several hosts, words are reduced inside each host, then between the hosts:

    host a   ranks 0 1 2      inside   {0 1 2} {3 4}
    host b   ranks 3 4        between  {0 2 3} {1 4}: columns, by place on the host modulo the
                                       smallest host, so that each has a rank of every host

This is exact because max is associative and idempotent: after the first reduction all ranks of a
host hold the same words, so it does not matter which of them, or how many, take part in the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.exchange.base import Exchange
from tpsample.ranks.process import ProcessRanks
from tpsample.settings import Settings


class CollectiveExchange(Exchange):
    """One all-reduce(MAX, int64) per chunk, in place, which works on any topology."""

    name = "collective"
    ranks: ProcessRanks

    def __init__(self, settings: Settings, sources: int = 1) -> None:
        super().__init__(settings, sources)
        self._works: list[dist.Work | None] = []

    def publish(self, chunk: int, rows: int) -> None:
        words = self.words[chunk, 0, :rows]
        self._works.append(self.ranks.start_all_reduce(words, dist.ReduceOp.MAX))

    def collect(self, rows: int) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            self._wait(work)
        return super().collect(rows)

    def _wait(self, work: dist.Work | None) -> None:
        self.ranks.wait(work, self.words)

    def reset(self) -> None:
        self._works = []
        super().reset()

    def bytes_sent(self, rows: int) -> int:
        """Return 2 (W - 1) / W of the words, as a ring sends; the collective may be another."""
        world_size = self.ranks.world_size
        return 2 * (world_size - 1) * 8 * rows * self.chunks // world_size


class P2PExchange(CollectiveExchange):
    """Sends this rank's words of every chunk to every other rank by send/recv.

    NCCL runs each batch on the process group's own stream. It waits for the words of its chunk and
    not for later chunks, and `wait()` makes the compute stream wait, not the host.
    """

    name = "p2p"

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


class TwoLevelExchange(CollectiveExchange):
    """Reduces each chunk inside the host while the next is computed, then once between hosts.

    `TwoLevelPeerExchange` takes its place where kernels can write to the peers of their host. The
    integers of filtered rows go over the whole group.
    """

    name = "two_level"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._best = torch.zeros_like(self.words[0, 0])
        self.inside, self.between = ranks_of_levels(settings)

    def publish(self, chunk: int, rows: int) -> None:
        words = self.words[chunk, 0, :rows]
        self._works.append(self.inside.start_all_reduce(words, dist.ReduceOp.MAX))

    def collect(self, rows: int) -> Tensor:
        words = super().collect(rows)
        if self.chunks > 1:
            torch.amax(words, dim=0, out=self._best[:rows])
            words[0].copy_(self._best[:rows])
        self.between.all_reduce(words[0], dist.ReduceOp.MAX)
        return words

    def bytes_sent(self, rows: int) -> int:
        """Return the bytes of two ring all-reduces, inside and between."""
        inside, between = self.inside.world_size, self.between.world_size
        sent = self.chunks * (inside - 1) * between + (between - 1) * inside
        return 16 * rows * sent // (inside * between)

    def reset(self) -> None:
        super().reset()
        self.inside.connect()
        self.between.connect()


def ranks_of_levels(settings: Settings) -> tuple[ProcessRanks, ProcessRanks]:
    """Return the ranks of this rank's host and those of its column. Collective."""
    ranks = settings.ranks
    assert isinstance(ranks, ProcessRanks)
    inside, between = levels(settings.hosts, ranks.rank)
    return ranks.subset("inside", inside), ranks.subset("between", between)


def levels(hosts: Sequence[str], rank: int) -> tuple[list[int], list[int]]:
    """Return the ranks of a rank's host and those of its column, ascending, itself among them.

    >>> levels(["a", "a", "a", "b", "b"], 4)
    ([3, 4], [1, 4])
    """
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    columns = min(map(len, by_host.values()))
    inside = by_host[hosts[rank]]
    column = inside.index(rank) % columns
    return inside, sorted(r for host in by_host.values() for r in host[column::columns])
