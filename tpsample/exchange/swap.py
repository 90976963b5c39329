"""The exchange of ranks that meet on the host: one message to every peer has all of a step.

    message   int64 [1 + rows + …]: the digest of the call (`tpsample.agreement.step`), the words,
              and the first integers about filtered rows and logprobs

Every call begins with such a message, even a call without words. A receiver accepts a message of
any length. So ranks whose calls or samplers differ still receive a digest from each other, and see
that they differ. A message takes one one-way latency for any number of ranks (`ranks.channel`).

A message carries at most MAX_PAYLOAD integers beside the words. More are gathered separately.

With two levels the ranks of a host swap messages first. Then each rank swaps the host's result with
one or more ranks of every other host. A host whose ranks differ sends the digest 0. The messages of
the second level carry words alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tpsample.core.tensors import ordinary_tensors
from tpsample.exchange.base import Exchange
from tpsample.ranks.channel import Arrival
from tpsample.ranks.process import ProcessRanks
from tpsample.ranks.ranks import MAX_PAYLOAD
from tpsample.settings import Settings


class SwapExchange(Exchange):
    """ "collective", "p2p" and "two_level" on CPUs. All chunks travel together, as one."""

    ranks: ProcessRanks
    levels: Sequence[ProcessRanks]

    def __init__(self, settings: Settings) -> None:
        super().__init__(replace(settings, chunks=1))
        self.takes_payload = len(self.levels) == 1
        self._make_inboxes()

    @ordinary_tensors  # later calls write to them, wherever this one was made
    def _make_inboxes(self) -> None:
        self._next: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._inboxes = [_Inbox(group, self.max_rows) for group in self.levels]
        self.words = self._inboxes[-1].words.unsqueeze(0)
        self._views.clear()
        self._rows: int | None = None
        self._agreed = False

    def _clear(self) -> None:
        for inbox in self._inboxes:
            inbox.words.zero_()

    def _own_words(self, chunk: int) -> Tensor:
        return self._inboxes[0].words[0]

    def set_digest(self, digest: int) -> None:
        """Send a digest of this call, which is never 0, with the words that follow."""
        self._inboxes[0].digests[0] = digest

    def attach_payload(self, tensors: Sequence[Tensor]) -> None:
        if sum(tensor.numel() for tensor in tensors) <= MAX_PAYLOAD:
            self._next = [*tensors]

    def publish(self, chunk: int, rows: int) -> None:
        self._sent, self._next = self._next, []
        more = [tensor.flatten() for tensor in self._sent]
        self.ranks.bytes_sent += (self.ranks.world_size - 1) * sum(tensor.nbytes for tensor in more)
        self._inboxes[0].start(rows, *more)
        self._rows = rows

    def payloads(self) -> list[Tensor] | None:
        if not self._sent:
            return None
        sizes = [tensor.numel() for tensor in self._sent]
        parts = self._inboxes[0].others[:, : sum(sizes)].split(sizes, dim=1)
        rank = self.ranks.rank
        return [
            torch.cat([others[:rank], mine.reshape(1, -1), others[rank:]]).view(-1, *mine.shape)
            for mine, others in zip(self._sent, parts, strict=True)
        ]

    def agrees(self) -> bool:
        """Wait for the words; return whether all ranks sent the same digest with them.

        Raises:
            PeerLost: a rank did not answer.
        """
        if self._rows is not None:
            rows, self._rows = self._rows, None
            for inbox, after in zip(self._inboxes, self._inboxes[1:], strict=False):
                inbox.wait()
                after.digests[0] = inbox.digests[0] if inbox.agrees() else 0
                words = inbox.words[:, :rows]
                torch.amax(words, dim=0, out=after.words[0, :rows])
                words.zero_()
                after.start(rows)
            self._inboxes[-1].wait()
            self._agreed = self._inboxes[-1].agrees()
        return self._agreed

    def collect(self, rows: int) -> Tensor:
        self.agrees()
        return super().collect(rows)

    def bytes_sent(self, rows: int) -> int:
        return sum(8 * rows * (group.world_size - 1) for group in self.levels)

    def reset(self) -> None:
        super().reset()
        # A call that was left may have put words here.
        self._make_inboxes()


class _Inbox:
    """The messages of the ranks of a group: this rank's message, then those of its peers.

    Attributes:
        digests: int64 [W].
        words: int64 [W, max_rows].
        others: int64 [W - 1, …], the payloads behind the words of the peers' messages.
    """

    def __init__(self, ranks: ProcessRanks, max_rows: int) -> None:
        self._ranks = ranks
        shape = ranks.world_size, 1 + max_rows
        self._messages = torch.zeros(shape, dtype=torch.int64, device="cpu")
        self.digests, self.words = self._messages[:, 0], self._messages[:, 1:]
        self._rows = 0
        self._arrival: Arrival | None = None

    def start(self, rows: int, *more: Tensor) -> None:
        self._rows = rows
        own = torch.cat([self._messages[0, : 1 + rows], *more])
        self._arrival = self._ranks.start_message(own)

    def wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        self._ranks.wait(arrival, self._messages)
        if arrival is not None:
            messages = arrival.messages()
            self._messages[1:, : 1 + self._rows] = messages[:, : 1 + self._rows]
            self.others = messages[:, 1 + self._rows :]

    def agrees(self) -> bool:
        digests = self.digests.tolist()
        return digests[0] != 0 and len(set(digests)) == 1
