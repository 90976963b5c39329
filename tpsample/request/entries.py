"""A slot's request, worked out once: an entry for the host, and numbers for the device."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tpsample.noise import signed64
from tpsample.request.batch_checks import CheckedRequest
from tpsample.request.filters import COLUMNS, RowFilter, keeps_all
from tpsample.request.params import SamplingParams
from tpsample.request.rows import OPEN, SHUT

ASKS, PROCESSED, AS_LOGITS, TOP, GATE, SEED, STATE = range(COLUMNS, COLUMNS + 7)
"""Numbers of a slot after its filters: whether it asks for logprobs, whether in a
processed mode, and of logits, how many of the most likely, its gate, its seed, and the slot of its
state in the tables of controls, which a request does not write."""

FILTERED, ASKS_LOGPROBS, UNSEEDED, EMPTY, NEEDS_APPEND = (1 << bit for bit in range(5))
"""Bits of the flags of a slot: it has filters, it asks for logprobs, it waits for its seed, it has
no request, its output changes its logits."""

WAITING = 0x54505F5741495421
"""The seed of a row that waits for one, an arbitrary number that nobody else writes."""

NO_REQUEST = CheckedRequest(SamplingParams(temperature=0.0, seed=0), (), ())
"""It stands in a slot that has no request."""


class Entry(NamedTuple):
    """A slot as the host knows it.

    Attributes:
        params: its request.
        filters: of the request.
        flags: FILTERED to NEEDS_APPEND.
        top: how many of the most likely tokens it reports.
        packed: what the device reads: the numbers before STATE.
    """

    params: SamplingParams
    filters: RowFilter
    flags: int
    top: int
    packed: bytes

    @property
    def processed(self) -> bool:
        """Whether its logprobs are of the processed logits."""
        return self.params.logprobs_mode.startswith("processed")

    @staticmethod
    def of(params: SamplingParams, vocab_size: int, *, empty: bool = False) -> Entry:
        """Return the entry of a request, whose numbers are computed once per request."""
        known = params.memo.get((vocab_size, empty))
        if known is None:
            known = params.memo[vocab_size, empty] = _known(params, vocab_size, empty)
        return Entry(params, *known)


def _known(
    params: SamplingParams, vocab_size: int, empty: bool
) -> tuple[RowFilter, int, int, bytes]:
    filters, mode = RowFilter.of(params, vocab_size), params.logprobs_mode
    top = params.logprobs or 0
    top = vocab_size if top == -1 else min(top, vocab_size)
    flags = (
        FILTERED * (filters != keeps_all(vocab_size))
        | ASKS_LOGPROBS * params.asks_logprobs
        | UNSEEDED * (params.seed is None)
        | EMPTY * empty
        | NEEDS_APPEND * params.needs_append
    )
    asks = params.asks_logprobs, mode.startswith("processed"), mode.endswith("logits"), top
    gate, seed = SHUT if empty else OPEN, WAITING
    if params.seed is not None:
        seed = signed64(params.seed)
    packed = struct.pack("=qqqqqq", *asks, gate, seed)
    return filters, flags, top, filters.packed() + packed
