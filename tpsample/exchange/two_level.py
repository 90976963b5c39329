"""Two levels for several hosts: words are reduced inside each host, then between the hosts.

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

from tpsample.exchange.base import Setup
from tpsample.exchange.collective import CollectiveExchange
from tpsample.ranks.process import ProcessRanks


class TwoLevelExchange(CollectiveExchange):
    """Reduces each chunk inside the host while the next is computed, then once between hosts.

    `TwoLevelPeerExchange` takes its place where kernels can write to the peers of their host. The
    integers of filtered rows go over the whole group.
    """

    name = "two_level"

    def __init__(self, setup: Setup) -> None:
        ranks = setup.ranks
        super().__init__(setup)
        self._best = torch.zeros_like(self.words[0, 0])
        assert isinstance(ranks, ProcessRanks)
        inside, between = levels(setup.hosts, ranks.rank)
        self.inside, self.between = ranks.subset("inside", inside), ranks.subset("between", between)

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
        return (
            16
            * rows
            * (self.chunks * (inside - 1) * between + (between - 1) * inside)
            // (inside * between)
        )

    def reset(self) -> None:
        super().reset()
        self.inside.connect()
        self.between.connect()


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
