"""The requests of all slots as tensors, from which a step picks its rows on the device.

A step that is told its rows by a tensor of slots cannot know on the host what they ask for. So it
does what any of the slots may need: if one has a filter, every row takes the way of rows with
filters, in which a row without any keeps all of its tokens; likewise with logprobs. The tokens are
the same either way. The tensors keep their place in memory as requests come and go, so a captured
CUDA graph reads what is there when it is replayed.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.host_tensors import columns_of, integers
from tpsample.core.ordinary_tensors import ordinary_tensors
from tpsample.core.staging import Scratch
from tpsample.request.filters import COLUMNS, RowFilter, RowFilters, Way, keeps_all
from tpsample.request.host_rows import IDLE, HostRows
from tpsample.request.logprob_rows import LogprobRows
from tpsample.request.params import SamplingParams
from tpsample.request.slot_rows import OPEN, SHUT, SlotRows

NO_REQUEST = SamplingParams(temperature=0.0, seed=0)
"""What stands in a slot that has no request."""


class SlotValues(NamedTuple):
    """What B rows of a step read of their slots.

    Attributes:
        temperature, seed: fp32 and int64 [B].
        filters, logprobs: of all B rows, if any slot has some; else None.
    """

    temperature: Tensor
    seed: Tensor
    filters: RowFilters | None
    logprobs: LogprobRows | None


class SlotParameters(ABC):
    """Parameters by slot.

    Attributes:
        temperature, seed: fp32 and int64 [S].
        gate: int64 [S + 1], OPEN where a slot may be drawn, else SHUT. The last one stands for no
            slot.
    """

    temperature: Tensor
    seed: Tensor
    gate: Tensor

    def temperature_of(self, rows: SlotRows) -> Tensor:
        """Return the temperatures of some rows, fp32 [B]; a row that is not drawn is greedy."""
        return rows.pick_drawn("temperature", self.temperature)

    def seed_of(self, rows: SlotRows) -> Tensor:
        """Return the seeds of some rows, int64 [B]."""
        return rows.pick_drawn("seed", self.seed)

    def state(self, rows: SlotRows) -> dict[str, object]:
        """Return what these rows read and no plan has, as `StepBatch.state` does."""
        return {}

    @property
    @abstractmethod
    def stores_logits(self) -> bool:
        """Whether a row may have filters or ask for logprobs."""

    @property
    @abstractmethod
    def launches(self) -> tuple[object, ...]:
        """What decides which launches a step makes; equal values, equal launches."""

    @abstractmethod
    def read(self, rows: SlotRows) -> SlotValues:
        """Return the parameters of the slots of some rows; one that is not drawn is greedy."""


ASKS, PROCESSED, AS_LOGITS, TOP, GATE = range(COLUMNS, COLUMNS + 5)
"""Numbers of a slot behind those of its filters: whether it asks for logprobs, whether in a
processed mode, and of logits, how many of the most likely, and its gate."""


class SlotTables(SlotParameters):
    """The requests of a batch by slot.

    All numbers of a slot lie in one table, so that a request comes, and a step reads its rows, in
    one operation.

    Args:
        temperature, seed: of the batch, fp32 and int64 [S]; they are read in place.

    Attributes:
        numbers: int64 [13, S + 1]: the columns of `RowFilters`, then ASKS to GATE.
        chosen: int64 [S + 1, C], the ids of which a slot wants logprobs, then -1.
    """

    def __init__(self, temperature: Tensor, seed: Tensor, vocab_size: int) -> None:
        self.temperature, self.seed, self._vocab_size = temperature, seed, vocab_size
        slots, device = seed.shape[0], seed.device
        no_request = _packed(NO_REQUEST, keeps_all(vocab_size), vocab_size, SHUT)
        self.numbers = columns_of(no_request, GATE + 1, device=device)[:, :1].repeat(1, slots + 1)
        self.chosen = self.numbers.new_full((slots + 1, 0), word.NO_TOKEN)
        self._filters: dict[int, RowFilter] = {}  # of the slots that have some
        self._logprobs: dict[int, tuple[int, bool]] = {}  # N, and whether the mode is processed
        self._scratch = Scratch(device)

    @ordinary_tensors
    def load(self, slots: Sequence[int], rows: HostRows) -> None:
        """Write the requests of some slots."""
        requests, vocab_size = rows.requests, self._vocab_size
        gates = [SHUT if idle else OPEN for idle in rows.selectors(IDLE)]
        each_of = zip(requests, rows.filters, gates, strict=True)
        packed = b"".join([_packed(its, filters, vocab_size, g) for its, filters, g in each_of])
        numbers = columns_of(packed, GATE + 1, device=None)[:, : len(slots)]
        index = self._scratch.send("slots", integers(slots, device=None)[0])
        self.numbers.index_copy_(1, index, self._scratch.send("numbers", numbers))
        self._load_chosen(index, [list(each.logprob_token_ids or ()) for each in requests])
        for slot, each, filters in zip(slots, requests, rows.filters, strict=True):
            self._filters.pop(slot, None)
            self._logprobs.pop(slot, None)
            if filters.top_k:
                self._filters[slot] = filters
            if each.asks_logprobs:
                self._logprobs[slot] = (_top_of(each, vocab_size), _is_processed(each))

    @property
    def gate(self) -> Tensor:  # type: ignore[override]
        return self.numbers[GATE]

    def _load_chosen(self, index: Tensor, chosen: list[list[int]]) -> None:
        missing = max(map(len, chosen)) - self.chosen.shape[1]
        if missing > 0:
            self.chosen = torch.nn.functional.pad(self.chosen, (0, missing), value=word.NO_TOKEN)
        width = self.chosen.shape[1]
        if width:
            padded = [i for ids in chosen for i in (*ids, *[word.NO_TOKEN] * (width - len(ids)))]
            (flat,) = integers(padded, device=None)
            self.chosen.index_copy_(0, index, self._scratch.send("ids", flat.view(-1, width)))

    @property
    def stores_logits(self) -> bool:
        return bool(self._filters or self._logprobs)

    @property
    def launches(self) -> tuple[object, ...]:
        kinds, vocab_size = set(self._filters.values()), self._vocab_size
        others = [kind for kind in kinds if kind.way is not Way.TOP_WORDS]
        modes = {processed for _, processed in self._logprobs.values()}
        return (
            self.stores_logits,
            max((kind.top_k for kind in kinds.difference(others)), default=0),
            *(any(k.top_k < vocab_size for k in each) for each in (kinds, others)),
            *(any(k.top_p < 1 for k in each) for each in (kinds, others)),
            any(kind.way is Way.THRESHOLD for kind in kinds),
            max((top for top, _ in self._logprobs.values()), default=-1),
            *(True in modes, self.chosen.shape[1]),
        )

    def read(self, rows: SlotRows) -> SlotValues:
        temperature, seed = self.temperature_of(rows), self.seed_of(rows)
        filters = logprobs = None
        if self.stores_logits:
            numbers = rows.pick_columns("numbers", self.numbers)
            if self._filters:
                kinds = [keeps_all(self._vocab_size), *set(self._filters.values())]
                filters = rows.filters(numbers[:COLUMNS], kinds)
            if self._logprobs:
                logprobs = self._logprobs_of(rows, numbers)
        return SlotValues(temperature, seed, filters, logprobs)

    def _logprobs_of(self, rows: SlotRows, numbers: Tensor) -> LogprobRows:
        tops, modes = zip(*self._logprobs.values(), strict=True)
        count = len(rows)
        bits = rows.scratch.take("bits", torch.bool, TOP - ASKS, count)
        asks, processed, as_logits = torch.ne(numbers[ASKS:TOP, :count], 0, out=bits)
        return LogprobRows(
            row_list=list(range(count)),
            row_index=rows.places,
            top=max(tops),
            top_of=numbers[TOP, :count],
            chosen=rows.scratch.pick("chosen", self.chosen, rows.index),
            processed_list=[any(modes)] * count,
            processed=processed,
            as_logits=as_logits,
            asks=asks,
        )


def _packed(request: SamplingParams, filters: RowFilter, vocab_size: int, gate: int) -> bytes:
    """Return the numbers of a slot with this request."""
    filters = filters if filters.top_k else keeps_all(vocab_size)
    asks, as_logits = request.asks_logprobs, request.logprobs_mode.endswith("logits")
    of_logprobs = asks, _is_processed(request), as_logits, _top_of(request, vocab_size)
    return filters.packed + struct.pack("=qqqqq", *of_logprobs, gate)


def _is_processed(request: SamplingParams) -> bool:
    return request.logprobs_mode.startswith("processed")


def _top_of(request: SamplingParams, vocab_size: int) -> int:
    top = request.logprobs or 0
    return vocab_size if top == -1 else min(top, vocab_size)
