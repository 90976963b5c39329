"""The interface of an exchange, and its member for one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tpsample.output import SampleOutput
from tpsample.ranks.integers import IntegerExchange
from tpsample.ranks.ranks import ProcessRanks, Ranks, group_timeout

Decode: TypeAlias = Callable[[Tensor, Tensor, SampleOutput], None]
"""Of a backend: from the words of all sources and the seeds, what a step returns."""


class Exchange:
    """Moves candidate words between ranks; this base class is the exchange of one rank.

    A step is: `begin`; the local step writes this rank's words of every part of its vocabulary
    into `own_words(part)`, `publish(part)` after each; `finish` at the end. All ranks make these
    calls in the same order with the same number of rows. Buffers are allocated here, once.

    Words are zero between steps: the kernel that reads them last clears them, so that no step has
    to. Of a step that was begun and never finished some may be left; the next `begin` clears those.
    A captured graph does not call `begin`: after such a step `reset` comes before its replay.

    Attributes:
        name: as in the `exchange` argument of `LMHeadSampler`; "none" for one rank.
        in_kernel: the local step's kernel publishes by itself (`peer`).
        parts: launches of the local step; one per chunk, or a single one if in_kernel.
        words: int64 [chunks, sources, max_rows], what `collect` looks at.
        own: index of this rank among the sources.
        integers: what filtered rows exchange beside their words.
    """

    name = "none"
    in_kernel = False

    def __init__(
        self, ranks: Ranks, max_rows: int, chunks: int, device: torch.device, sources: int = 1
    ) -> None:
        self.ranks = ranks
        self.max_rows = max_rows
        self.chunks = chunks
        self.parts = chunks
        self.own = 0
        self.integers = IntegerExchange(ranks)
        self.words = torch.zeros(chunks, sources, max_rows, dtype=torch.int64, device=device)
        self._unfinished = False

    def kernel_arguments(self) -> dict[str, Any]:
        """What `lm_head_kernel` needs to know of the exchange, the same in every step; here, that
        it pushes nothing."""
        return {
            "arrive_ptr": self.words,
            "epoch_ptr": self.words,
            "lost_ptr": self.words,
            "inboxes_ptr": self.words,
            "num_chunks": self.chunks,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "max_rows": self.max_rows,
            "PUSH": False,
            "BLOCK_W": 1,
        }

    def begin(self) -> None:
        """Make sure that the words are zero."""
        if self._unfinished:
            self.words.zero_()
        self._unfinished = True

    def own_words(self, chunk: int) -> Tensor:
        """int64 [max_rows], where the local step leaves the words of a chunk."""
        return self.words[chunk, self.own]

    def publish(self, chunk: int, rows: int) -> None:
        """Start sending the first `rows` words of a chunk to the peers."""

    def collect(self, rows: int) -> Tensor:
        """Words [chunks · sources, rows] whose maximum over axis 0 decides; never waits on the
        host for a GPU."""
        return self.words.flatten(0, 1)[:, :rows]

    def finish(self, out: SampleOutput, seeds: Tensor, decode: Decode) -> None:
        """Write the step's tokens, status and seeds; `decode` does it from the words of all
        sources, and clears them."""
        decode(self.collect(out.token_ids.numel()), seeds, out)
        self._unfinished = False

    def bytes_sent(self, rows: int) -> int:
        """Bytes of words this rank hands to its peers per step."""
        return 0

    @property
    def compares_steps(self) -> bool:
        """Whether ranks compare a step's arguments before it: where the host waits anyway."""
        return self.ranks.world_size > 1 and self.words.device.type == "cpu"

    def check(self) -> None:
        """Raise if a rank failed to answer in an earlier step. Waits for the GPU.

        Raises:
            PeerLost: naming the ranks.
            RankMismatch: one of them refused the step; the error it raised.
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
