"""The requests of all slots as tensors, from which a step picks its rows on the device.

A step that is told its rows by a tensor of slots cannot know on the host what they ask for. So it
does what any of the slots may need: if one has a filter, every row takes the way of rows with
filters, in which a row without any keeps all of its tokens; likewise with logprobs. The tokens are
the same either way. The tensors keep their place in memory as requests come and go, so a captured
CUDA graph reads what is there when it is replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.host_tensors import ALIGNED, columns_of, integers
from tpsample.request.filters import COLUMNS, RowFilter, RowFilters, Way, keeps_all
from tpsample.request.logprob_rows import LogprobRows
from tpsample.request.params import SamplingParams

IDLE = SamplingParams(temperature=0.0, seed=0)
"""The request of a slot that has none."""


class SlotRows(NamedTuple):
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
        live: bool [S + 1], whether a slot may be drawn. The last one stands for no slot.
    """

    live: Tensor

    @property
    @abstractmethod
    def stores_logits(self) -> bool:
        """Whether a row may have filters or ask for logprobs."""

    @property
    @abstractmethod
    def launches(self) -> tuple[object, ...]:
        """What decides which launches a step makes; equal values, equal launches."""

    @abstractmethod
    def read(self, index: Tensor) -> SlotRows:
        """Return the parameters of some slots, int64 [B]; S stands for no slot, and is greedy."""


class SlotTables(SlotParameters):
    """The requests of a batch by slot.

    Args:
        temperature, seed: of the batch, fp32 and int64 [S]; they are read in place.

    Attributes:
        columns: int64 [8, S + 1], as `RowFilters` has them.
        asked: int64 [4, S + 1]: whether a slot asks for logprobs, how many of the most likely, and
            whether in a processed mode, and of logits.
        chosen: int64 [S + 1, C], the ids of which a slot wants logprobs, then -1.
    """

    def __init__(self, temperature: Tensor, seed: Tensor, vocab_size: int) -> None:
        self._temperature, self._seed, self._vocab_size = temperature, seed, vocab_size
        slots, device = seed.shape[0], seed.device
        self.live = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        all_kept = columns_of(keeps_all(vocab_size).packed, COLUMNS, device=device)[:, :1]
        self.columns = all_kept.repeat(1, slots + 1)
        self.asked = torch.zeros(4, slots + 1, dtype=torch.int64, device=device)
        self.chosen = self.asked.new_full((slots + 1, 0), word.NO_TOKEN)
        self._filters: dict[int, RowFilter] = {}  # of the slots that have some
        self._logprobs: dict[int, tuple[int, bool]] = {}  # N, and whether the mode is processed

    @torch.inference_mode(False)
    def load(self, slots: Sequence[int], requests: Sequence[SamplingParams]) -> None:
        """Write the requests of some slots; `IDLE` frees a slot."""
        vocab_size, device = self._vocab_size, self.live.device
        filters = [RowFilter.of(each, vocab_size) for each in requests]
        packed = b"".join([its.packed or keeps_all(vocab_size).packed for its in filters])
        asks = [each.asks_logprobs for each in requests]
        tops = [each.logprobs or 0 for each in requests]
        tops = [vocab_size if top == -1 else min(top, vocab_size) for top in tops]
        processed = [each.logprobs_mode.startswith("processed") for each in requests]
        as_logits = [each.logprobs_mode.endswith("logits") for each in requests]
        (index,) = integers(slots, device=device)
        asked = torch.tensor([asks, tops, processed, as_logits], dtype=torch.int64)
        self.columns[:, index] = columns_of(packed, COLUMNS, device=device)[:, : len(slots)]
        self.asked[:, index] = asked.to(device)
        self.live[index] = torch.tensor([each is not IDLE for each in requests]).to(device)
        self._load_chosen(index, [list(each.logprob_token_ids or ()) for each in requests])
        for i, slot in enumerate(slots):
            self._filters.pop(slot, None)
            self._logprobs.pop(slot, None)
            if filters[i].top_k:
                self._filters[slot] = filters[i]
            if asks[i]:
                self._logprobs[slot] = (tops[i], processed[i])

    def _load_chosen(self, index: Tensor, chosen: list[list[int]]) -> None:
        missing = max(map(len, chosen)) - self.chosen.shape[1]
        if missing > 0:
            self.chosen = torch.nn.functional.pad(self.chosen, (0, missing), value=word.NO_TOKEN)
        width = self.chosen.shape[1]
        padded = [[*ids, *[word.NO_TOKEN] * (width - len(ids))] for ids in chosen]
        flat = torch.tensor(padded, dtype=torch.int64).view(len(padded), width)
        self.chosen[index] = flat.to(index.device)

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
            any(kind.way is Way.REJECTION_IN_TOP_K for kind in kinds),
            max((top for top, _ in self._logprobs.values()), default=-1),
            *(True in modes, self.chosen.shape[1]),
        )

    def read(self, index: Tensor) -> SlotRows:
        there = index < self._seed.shape[0]
        inside = index.where(there, 0)
        return SlotRows(
            self._temperature[inside].where(there, 0.0),
            self._seed[inside].where(there, 0),
            self._read_filters(index) if self._filters else None,
            self._read_logprobs(index) if self._logprobs else None,
        )

    def _read_filters(self, index: Tensor) -> RowFilters:
        kinds = [keeps_all(self._vocab_size), *set(self._filters.values())]
        padded = torch.nn.functional.pad(index, (0, -len(index) % ALIGNED))
        return filters_of_all(len(index), self.columns[:, padded], kinds)

    def _read_logprobs(self, index: Tensor) -> LogprobRows:
        asks, top_of, processed, as_logits = self.asked[:, index]
        tops, modes = zip(*self._logprobs.values(), strict=True)
        rows = len(index)
        return LogprobRows(
            row_list=list(range(rows)),
            row_index=torch.arange(rows, device=index.device),
            top=max(tops),
            top_of=top_of,
            chosen=self.chosen[index],
            processed_list=[any(modes)] * rows,
            processed=processed != 0,
            as_logits=as_logits != 0,
            asks=asks != 0,
        )


def filters_of_all(rows: int, columns: Tensor, kinds: list[RowFilter]) -> RowFilters:
    """Return the filters of rows that the host does not know, all of which may have some.

    Args:
        rows: B.
        columns: int64 [8, B or more], as `RowFilters` has them.
        kinds: what may occur, a row that keeps all of its tokens among it.
    """
    row_index = torch.arange(rows, device=columns.device)
    return RowFilters(row_index, list(range(rows)), columns, kinds)
