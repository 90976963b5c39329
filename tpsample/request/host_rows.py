"""What the host knows of a batch's rows: the request of each, and what a plan asks of it.

Batches change between steps, and most rows stay. So what is known of a request is worked out when
it comes, and moves with it in lists that are gone through in C.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tpsample.request.filters import RowFilter
from tpsample.request.params import SamplingParams

FILTERED, ASKS_LOGPROBS = 1, 2
"""Bits of the flags of a row."""

_SELECTORS = {bit: bytes(bool(flags & bit) for flags in range(256)) for bit in (1, 2)}


class HostRows(NamedTuple):
    """Rows, in order.

    Attributes:
        requests: of each row.
        filters: of each row.
        flags: of each row, whether it has filters, and whether it asks for logprobs.
    """

    requests: list[SamplingParams]
    filters: list[RowFilter]
    flags: bytes

    @staticmethod
    def of(requests: Sequence[SamplingParams], vocab_size: int) -> HostRows:
        """Return rows with these requests."""
        filters = [RowFilter.of(each, vocab_size) for each in requests]
        flags = [
            FILTERED * (its.top_k > 0) + ASKS_LOGPROBS * each.asks_logprobs
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
        return HostRows(
            list(map(self.requests.__getitem__, order)),
            list(map(self.filters.__getitem__, order)),
            bytes(map(self.flags.__getitem__, order)),
        )

    def replaced(self, rows: Sequence[int], others: HostRows) -> HostRows:
        """Return the rows with others in the places of some."""
        order = list(range(len(self.requests)))
        for row, place in zip(rows, itertools.count(len(order)), strict=False):
            order[row] = place
        return self.joined_by(others).picked(order)

    def selectors(self, bit: int) -> bytes:
        """Return 1 or 0 for each row, whether it has a flag."""
        return self.flags.translate(_SELECTORS[bit])
