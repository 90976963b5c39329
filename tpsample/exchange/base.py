"""The interface of an exchange, its member for one rank, and the levels of several hosts.

With two levels words are reduced inside each host, then between the hosts:

    host a   ranks 0 1 2      inside   {0 1 2} {3 4}
    host b   ranks 3 4        between  {0 2 3} {1 4}: columns, by place on the host modulo the
                                       smallest host, so that each has a rank of every host

This is exact because max is associative and idempotent: after the first reduction all ranks of a
host hold the same words. So it does not matter which of them, or how many, take part in the second.
The integers of filtered rows go over the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpsample.backends import room_of
from tpsample.output import SampleOutput
from tpsample.ranks.process import ProcessRanks
from tpsample.ranks.ranks import Ranks
from tpsample.ranks.subgroups import group_timeout
from tpsample.request.plan import FilteredWords, Undrawn
from tpsample.request.step import Push
from tpsample.settings import Settings


class Exchange:
    """Moves candidate words between ranks; this base class is the exchange of one rank.

    A step calls `begin`, which returns memory for the words of each part of the vocabulary. It
    writes the words of a part and calls `publish(part)`. At the end it calls `wait` and `finish`.
    All ranks make these calls in the same order with the same number of rows. Buffers are allocated
    here, once.

    Words are zero between steps, because the decoder clears them. If a step was begun and never
    finished, the next `begin` clears its words. The replay of a captured graph does not call
    `begin`, so after such a step it needs a `reset`.

    Attributes:
        name: as in the `exchange` argument of `LMHeadSampler`; "none" for one rank.
        levels: the groups that reduce words one after the other: the ranks, or with two levels
            those of this rank's host and those of its column.
        parts: how many launches the local step makes: one per chunk, or a single one with `push`.
        words: int64 [chunks, sources, max_rows], the words that `collect` returns.
        own: index of this rank among the sources.
        push: arguments by which the kernel of the local step publishes; None if the host does.
        takes_payload: whether `attach_payload` sends further integers with the words.
    """

    takes_payload = False
    push: Push | None = None

    def __init__(self, settings: Settings, sources: int = 1) -> None:
        self.ranks, self.max_rows = settings.ranks, settings.max_rows
        self.name = settings.exchange.removesuffix("_peer")
        self.levels: Sequence[Ranks] = [self.ranks]
        if self.name == "two_level":
            assert isinstance(self.ranks, ProcessRanks)
            both = zip(("inside", "between"), levels(settings.hosts, self.ranks.rank), strict=True)
            self.levels = [self.ranks.subset(*level) for level in both]
        self.parts = self.chunks = settings.chunks
        self.own = 0
        # No launch overlaps the kernel before where a collective moves the words in between.
        overlap = settings.overlap and self.ranks.world_size == 1
        self._decode = room_of(settings.backend).decoder(overlap=overlap)
        shape = (self.chunks, sources, self.max_rows)
        self.words = torch.zeros(shape, dtype=torch.int64, device=settings.device)
        self._unfinished = False
        self._views: dict[int, tuple[list[Tensor], Tensor]] = {}

    def begin(self, rows: int) -> list[Tensor]:
        """Return zeros for the words of each part, int64 [rows], which the local step fills."""
        if self._unfinished:
            self._clear()
        self._unfinished = True
        return (self._views.get(rows) or self._make_views(rows))[0]

    def _clear(self) -> None:
        self.words.zero_()

    def _make_views(self, rows: int) -> tuple[list[Tensor], Tensor]:
        """Make the views of `rows` rows that `begin` and `collect` return.

        They are made once, because every view takes the host a microsecond.
        """
        own = [self._own_words(part)[:rows] for part in range(self.parts)]
        views = self._views[rows] = own, self.words.flatten(0, 1)[:, :rows]
        return views

    def _own_words(self, chunk: int) -> Tensor:
        """Return int64 [max_rows], this rank's words of a chunk."""
        return self.words[chunk, self.own]

    def publish(self, chunk: int, rows: int) -> None:
        """Start sending the first `rows` words of a chunk to the peers."""

    def attach_payload(self, tensors: Sequence[Tensor]) -> None:
        """Send int64 tensors with the words that are published next; shapes match across ranks."""

    def payloads(self) -> list[Tensor] | None:
        """Return the payloads of all ranks, [W, ...] each, after `wait`; None without any."""
        return None

    def collect(self, rows: int) -> Tensor:
        """Return words [chunks · sources, rows]; their maximum over axis 0 is the winner.

        The host never waits for a GPU here.
        """
        return (self._views.get(rows) or self._make_views(rows))[1]

    def wait(self, out: SampleOutput, seeds: Tensor, undrawn: Undrawn | None = None) -> Tensor:
        """Wait for the words of all sources, and return the result of `collect`.

        If a kernel waits, it writes the output at once, and `finish` overwrites it if some rows
        have filters. The arguments are those of `finish`.
        """
        return self.collect(out.token_ids.numel())

    def finish(
        self,
        words: Tensor,
        out: SampleOutput,
        seeds: Tensor,
        undrawn: Undrawn | None = None,
        filtered: FilteredWords | None = None,
    ) -> None:
        """Write the step's tokens, status and seeds.

        Args:
            words: the result of `wait`.
            undrawn: rows that get no token, whatever their words are; None for no such rows.
            filtered: the words of rows with filters; None for no such rows.
        """
        self._decode(words, seeds, out, undrawn, filtered)
        self._unfinished = False

    def bytes_sent(self, rows: int) -> int:
        """Return how many bytes of words this rank hands to its peers per step."""
        return 0

    def check(self) -> None:
        """Raise if a rank failed to answer in an earlier step. Waits for the GPU.

        Raises:
            PeerLost: ranks are lost; it names them.
            RankMismatch: one of them refused the step; the text is that of its error.
        """
        if self.words.device.type == "cuda" and isinstance(self.ranks, ProcessRanks):
            reached = torch.cuda.Event()
            reached.record()
            timeout_s = group_timeout(self.ranks.group).total_seconds()
            self.ranks.roll.wait_until(reached.query, timeout_s)

    def reset(self) -> None:
        """Forget every word in flight and every lost rank. Collective; no step may be running.

        Raises:
            PeerLost: a rank did not come.
        """
        self.ranks.renew()
        self.words.zero_()
        self._unfinished = False

    def close(self) -> None:
        """Release what the exchange holds. Collective."""


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
