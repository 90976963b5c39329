"""A slot's request, worked out once: an entry for the host, and numbers for the device."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tpsample.noise import signed64
from tpsample.request.params import SamplingParams
from tpsample.request.row_filter import COLUMNS, RowFilter, keeps_all

ASKS, PROCESSED, AS_LOGITS, TOP, OCCUPANCY, SEED, STATE = range(COLUMNS, COLUMNS + 7)
"""Columns of a slot after the columns of its filters: whether it asks for logprobs, whether their
mode is a processed one, whether it is one of logits. Then come how many most likely tokens are
reported, the occupancy, the seed, and the index of the slot's state in the tables of controls. A
request does not write the last one."""

OCCUPIED, VACANT = 2**62, -1
"""The occupancy of a slot with a request, which is above the number of any row, and of one without
a request."""

FILTERED, ASKS_LOGPROBS, UNSEEDED, EMPTY, NEEDS_APPEND, UNKNOWN = (1 << bit for bit in range(6))
"""Bits of the flags of a slot: it has filters, asks for logprobs, waits for its seed, has no
request; it has logits that depend on its output, has filters that only the device knows."""

WAITING = 0x54505F5741495421
"""The seed of a row that waits for one, an arbitrary number that nobody else writes."""

NO_REQUEST = SamplingParams(temperature=0.0, seed=0)
"""It stands in a slot that has no request."""


class Entry(NamedTuple):
    """A slot as the host knows it: a request that was checked, with its tokens so far.

    Attributes:
        params: the request.
        filters: the filters of the request; the filters that may be on in an UNKNOWN row.
        flags: bits FILTERED to UNKNOWN.
        top: how many of the most likely tokens the row reports.
        packed: the numbers before STATE, as the device reads them.
        prompt, output: copies of the tokens so far, if the request looks at them. Prompt ids
            outside the vocabulary, such as the placeholders of an image, are left out.
    """

    params: SamplingParams
    filters: RowFilter
    flags: int
    top: int
    packed: bytes
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    @property
    def processed(self) -> bool:
        """Whether its logprobs are of the processed logits."""
        return self.params.logprobs_mode.startswith("processed")

    @staticmethod
    def of(
        params: SamplingParams,
        vocab_size: int,
        prompt: tuple[int, ...] = (),
        output: tuple[int, ...] = (),
    ) -> Entry:
        """Return the entry of a request, whose numbers are computed once per request.

        `NO_REQUEST` itself stands for none.
        """
        known = params.memo.get(vocab_size)
        if known is None:
            known = params.memo[vocab_size] = _known(params, vocab_size)
        so_far = (prompt, output) if params.reads_output else ()
        return Entry(params, *known, *so_far)


def _known(params: SamplingParams, vocab_size: int) -> tuple[RowFilter, int, int, bytes]:
    filters, mode = RowFilter.of(params, vocab_size), params.logprobs_mode
    empty = params is NO_REQUEST
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
    occupancy, seed = VACANT if empty else OCCUPIED, WAITING
    if params.seed is not None:
        seed = signed64(params.seed)
    packed = struct.pack("=qqqqqq", *asks, occupancy, seed)
    return filters, flags, top, filters.packed() + packed
