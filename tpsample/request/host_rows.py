"""What the host knows of a batch's rows: the request of each, and what a plan asks of it.

Batches change between steps, and most rows stay. So what is known of a request is worked out when
it comes, and moves with it in lists that are gone through in C.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from tpsample.request.filters import RowFilter
from tpsample.request.params import SamplingParams

FILTERED, ASKS_LOGPROBS, UNSEEDED, IDLE, NEEDS_APPEND = 1, 2, 4, 8, 16
"""Bits of the flags of a row."""

_SELECTORS = {bit: bytes(bool(flags & bit) for flags in range(256)) for bit in (1, 2, 4, 8, 16)}
_SEEDED = bytes(flags & ~UNSEEDED for flags in range(256))


class HostRows(NamedTuple):
    """Rows, in order.

    Attributes:
        requests: of each row.
        filters: of each row.
        flags: of each row, whether it has filters, whether it asks for logprobs, whether it waits
            for its seed, whether it is a slot without a request, and whether the output changes
            its logits.
    """

    requests: list[SamplingParams]
    filters: list[RowFilter]
    flags: bytes

    @staticmethod
    def of(requests: Sequence[SamplingParams], vocab_size: int, *, idle: bool = False) -> HostRows:
        """Return rows with these requests; with `idle` they stand for slots without any."""
        filters = [RowFilter.of(each, vocab_size) for each in requests]
        flags = [
            FILTERED * (its.top_k > 0)
            + ASKS_LOGPROBS * each.asks_logprobs
            + UNSEEDED * (each.seed is None)
            + IDLE * idle
            + NEEDS_APPEND * each.needs_append
            for each, its in zip(requests, filters, strict=True)
        ]
        return HostRows(list(requests), filters, bytes(flags))

    def joined_by(self, others: HostRows) -> HostRows:
        """Return the rows with others behind them."""
        return HostRows(
            self.requests + others.requests,
            self.filters + others.filters,
            self.flags + others.flags,
        )

    def picked(self, order: list[int]) -> HostRows:
        """Return some of the rows, in another order."""
        if len(order) < 2:  # itemgetter returns a sequence of two or more
            one = slice(order[0], order[0] + 1) if order else slice(0)
            return HostRows(self.requests[one], self.filters[one], self.flags[one])
        pick = itemgetter(*order)
        return HostRows(
            list(pick(self.requests)), list(pick(self.filters)), bytes(pick(self.flags))
        )

    def replaced(self, rows: Sequence[int], others: HostRows) -> HostRows:
        """Return the rows with others in the places of some."""
        order = list(range(len(self.requests)))
        for row, place in zip(rows, itertools.count(len(order)), strict=False):
            order[row] = place
        return self.joined_by(others).picked(order)

    def seeded(self) -> HostRows:
        """Return the rows, none of which waits for its seed any more."""
        return self._replace(flags=self.flags.translate(_SEEDED))

    def selectors(self, bit: int) -> bytes:
        """Return 1 or 0 for each row, whether it has a flag."""
        return self.flags.translate(_SELECTORS[bit])
