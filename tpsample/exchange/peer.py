"""The exchange in the kernel: the LM head writes words into the peers' inboxes.

The protocol is in `backends.triton_.kernels.inbox`, the memory in `tpsample.exchange.inboxes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from tpsample.backends.triton_.arguments import early_launch
from tpsample.backends.triton_.kernels.inbox import peer_finish_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.exchange.base import Exchange
from tpsample.exchange.collective import require_maximum, ring_bytes
from tpsample.exchange.inboxes import peer_memory
from tpsample.output import SampleOutput
from tpsample.ranks.lost import peer_lost
from tpsample.ranks.process import ProcessRanks
from tpsample.request.plan import FilteredWords, Undrawn
from tpsample.request.step import Push
from tpsample.settings import Settings

MAX_WORLD_SIZE = 63
"""Lost ranks are bits of one int64."""

_BLOCK_B, _MIN_BLOCK_S, _MAX_BLOCK_S = 32, 2, 16
"""Blocks of the kernel that waits. It needs 64 words, even for the only rank of a host."""
_MAX_TIMEOUT_MS = 2**31 - 1
"""For an argument of more than 32 bits Triton would compile another kernel."""


class PeerExchange(Exchange):
    """One launch computes and pushes all chunks. The launch of `wait` waits, decodes and clears.

    A step can be captured in a CUDA graph, because nothing that changes from step to step is an
    argument from the host: the epoch is counted on the device.

    Attributes:
        timeout_s: how long a step waits for a rank before its rows become PEER_LOST. The default
            is long enough for a peer that still compiles its kernels.
    """

    push: Push
    levels: Sequence[ProcessRanks]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        ranks, device = self.levels[0], settings.device
        chunks, max_rows = settings.chunks, settings.max_rows
        if ranks.world_size > MAX_WORLD_SIZE:
            raise ValueError(
                f'exchange: "peer" takes up to {MAX_WORLD_SIZE} ranks, got {ranks.world_size}; '
                'use exchange="collective"'
            )
        self.parts = 1
        self.timeout_s = 60.0
        self._overlap = settings.overlap
        self.arrive = torch.zeros(chunks, max_rows, dtype=torch.int32, device=device)
        self.epoch = torch.ones(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(4, dtype=torch.int64, device=device)
        self._winners = torch.zeros(1, max_rows, dtype=torch.int64, device=device)
        shape = (2, chunks, ranks.world_size, max_rows)
        self.memory = peer_memory(ranks, shape, device)
        layout = (chunks, ranks.rank, ranks.world_size, max_rows)
        between = self._between = (
            BetweenHosts(self.levels[1], settings) if len(self.levels) > 1 else None
        )
        # The ranks of each host, and bits of its lost ranks: those unheard, those that reported.
        self._hosts = between.hosts if between else [[*range(ranks.world_size)]]
        self._lost_of_host = between.lost if between else self._lost[:2].unsqueeze(0)
        self.push = Push(self.arrive, self.epoch, self._lost, self.memory.addresses, *layout)

    def wait(self, out: SampleOutput, seeds: Tensor, undrawn: Undrawn | None = None) -> Tensor:
        """Wait on the device for every rank's words; the kernel that waits decodes them too.

        With two levels it waits for this host's words, and then for those of other hosts.
        """
        num_rows, push = out.status.shape[0], self.push
        num_slots = push.num_chunks * push.world_size
        undrawn_rows, bad_rows = undrawn or (None, None)
        launch_kernel(
            peer_finish_kernel,
            (-(-num_rows // _BLOCK_B),),
            inboxes_ptr=self.memory.addresses,
            epoch_ptr=self.epoch,
            done_ptr=self.done,
            lost_ptr=self._lost,
            seed_ptr=seeds,
            undrawn_ptr=undrawn_rows,
            bad_ptr=bad_rows,
            words_ptr=self._winners,
            token_ptr=out.token_ids,
            status_ptr=out.status,
            out_seed_ptr=out.seeds,
            num_rows=num_rows,
            num_samples=out.token_ids.numel() // num_rows,
            num_slots=num_slots,
            rank=push.rank,
            world_size=push.world_size,
            max_rows=push.max_rows,
            timeout_ms=min(math.ceil(self.timeout_s * 1e3), _MAX_TIMEOUT_MS),
            BLOCK_S=min(_MAX_BLOCK_S, max(_MIN_BLOCK_S, triton.next_power_of_2(num_slots))),
            BLOCK_B=_BLOCK_B,
            OVERLAP=self._overlap,
            num_warps=1,
            **early_launch(self._overlap),
        )
        self._unfinished = False
        words = self.collect(out.token_ids.numel())
        return self._between.reduced(words, self._lost[:2]) if self._between else words

    def _make_views(self, rows: int) -> tuple[list[Tensor], Tensor]:
        own, _ = super()._make_views(rows)
        views = self._views[rows] = own, self._winners[:, :rows]
        return views

    def finish(
        self,
        words: Tensor,
        out: SampleOutput,
        seeds: Tensor,
        undrawn: Undrawn | None = None,
        filtered: FilteredWords | None = None,
    ) -> None:
        if filtered is not None or self._between:  # else `wait` has written all
            super().finish(words, out, seeds, undrawn, filtered)

    def bytes_sent(self, rows: int) -> int:
        own = (self.push.world_size - 1) * 8 * rows * self.chunks
        return own + (self._between.bytes_sent(rows) if self._between else 0)

    def check(self) -> None:
        unheard, reporting = (
            tuple(
                rank
                for ranks, bits in zip(self._hosts, of_hosts, strict=True)
                for bit, rank in enumerate(ranks)
                if bits >> bit & 1
            )
            for of_hosts in self._lost_of_host.T.tolist()
        )
        if unheard or reporting:
            mine, from_mine, _, step = self._lost.tolist()
            seen = unheard, reporting, step if mine or from_mine else None
            roll = self.ranks.roll
            raise roll.lost(*seen) if roll else peer_lost(*seen, {})

    def reset(self) -> None:
        super().reset()
        self.memory.barrier()
        for tensor in (self.memory.own, self.arrive, self.done, self._lost, self._lost_of_host):
            tensor.zero_()
        self.epoch.fill_(1)
        self.memory.barrier()

    def close(self) -> None:
        self.memory.close()


class BetweenHosts:
    """The second level of `exchange="two_level"` behind kernels that write to peers of their host.

    The hosts reduce their winners and their lost ranks. LOST is greater than any other word, so a
    row that is lost on one host is lost on all. Two integers per host follow the words, with a bit
    for each lost rank. Each host writes its own integers and 0 for other hosts, so the maximum has
    the integers of all.

    Args:
        ranks: the ranks of this rank's column.
        settings: the settings of the sampler.

    Attributes:
        hosts: the ranks of each host.
        lost: int64 [hosts, 2], see `PeerExchange`.
    """

    def __init__(self, ranks: ProcessRanks, settings: Settings) -> None:
        names = list(dict.fromkeys(settings.hosts))
        self.hosts = [[r for r, h in enumerate(settings.hosts) if h == name] for name in names]
        self.lost = torch.zeros(len(names), 2, dtype=torch.int64, device=settings.device)
        self._host = names.index(settings.hosts[settings.ranks.rank])
        size = settings.max_rows + self.lost.numel()
        self._reduced = torch.zeros(size, dtype=torch.int64, device=settings.device)
        self._ranks, self._all = ranks, settings.ranks
        require_maximum(ranks, settings.device)

    def reduced(self, winners: Tensor, lost: Tensor) -> Tensor:
        """Return the winners of all hosts, int64 [1, rows].

        Args:
            winners: those of this host.
            lost: int64 [2], the lost ranks of this host.
        """
        rows = winners.shape[1]
        reduced = self._reduced[: rows + self.lost.numel()].zero_()
        reduced[:rows].copy_(winners[0])
        lost_of_host = reduced[rows:].view_as(self.lost)
        lost_of_host[self._host].copy_(lost)
        self._ranks.all_reduce(reduced, dist.ReduceOp.MAX)
        self._all.bytes_sent += ring_bytes(self._ranks, self.lost.numel())

        self.lost |= lost_of_host
        return reduced[None, :rows]

    def bytes_sent(self, rows: int) -> int:
        """Return how many bytes of words this rank hands to its column; `reduced` counts others."""
        return ring_bytes(self._ranks, rows)
