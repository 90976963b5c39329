"""The requests of a batch by slot, on the host and on the device.

The rows of a step are an index into this table. The host knows the index if it is the slots in use,
in order, or if a tensor on a CPU names the slots. It never reads a tensor on a GPU
(`tpsample.request.selection`), so it does not know the requests of such rows. Their step does all
that any slot may need: if one slot has a filter, every row is sampled as a filtered row, and a row
without filters keeps all of its tokens. The same holds for logprobs. The tokens do not change.

All integers of a slot lie in one tensor, so one operation writes a request, and one reads the rows
of a step. The tensors never move in memory, so a captured CUDA graph reads the requests that are
there when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.checks import describe, require_memory, require_plain
from tpsample.core.one_thread import OneThread
from tpsample.core.row_noise import SeedSource
from tpsample.core.tensors import (
    ALIGNED,
    HasViews,
    Scratch,
    columns_of,
    ordinary_tensors,
    tensors_of,
)
from tpsample.request.controls.tables import ControlTables, needs_controls, padded, widened
from tpsample.request.entries import (
    ASKS,
    ASKS_LOGPROBS,
    EMPTY,
    FILTERED,
    NO_REQUEST,
    OCCUPANCY,
    SEED,
    STATE,
    TOP,
    UNKNOWN,
    UNSEEDED,
    VACANT,
    WAITING,
    Entry,
)
from tpsample.request.filters import LogprobRows, RowFilters
from tpsample.request.plan import BatchPlan
from tpsample.request.row_filter import Demand, RowFilter, keeps_all

_HAS = [bytes(bool(flags & wanted) for flags in range(256)) for wanted in range(64)]
"""`_HAS[wanted][flags]` is 1 if an entry with these flags has one of the wanted flags, else 0."""

_PARAMS, _FILTERS, _FLAGS, _, _PACKED = map(itemgetter, range(5))
"""Getters of an entry's fields. They take a third of the time of attributes."""


class RequestTable(HasViews):
    """S slots. The first ones are in use: they have a request or are empty.

    Attributes:
        vocab_size, slots, device: V, S, and the device of all tensors.
        entries: the entries of the slots in use, in order.
        version: a number that changes when requests join, leave, move or change.
        unseeded, empty: the slots that wait for a seed, and the slots without a request.
        stores_logits: whether a slot has filters or asks for logprobs.
        temperature: fp32 [S + 1]; the last entry is 0, because undrawn rows read it.
        numbers: int64 [STATE + 1, S + 1 or more]: the columns of `RowFilters`, then ASKS to STATE.
        seed, occupancy: int64 [S + 1], views of `numbers`; occupancy is OCCUPIED or VACANT.
        row_temperature, row_seed: views of the slots in use.
        chosen: int64 [S + 1, C], the ids whose logprobs a slot wants, then -1.
        controls: penalties and constraints; None until a request or a mask needs them.
        plans: the plans of selections, by `BatchPlan.fixed_rounds` and the slots that rows read.
    """

    version = 0
    controls: ControlTables | None = None
    _features: tuple[set[RowFilter], int, bool] | None  # `batch_features`, until the entries change

    @ordinary_tensors
    def __init__(self, slots: int, vocab_size: int, device: torch.device | str | None) -> None:
        require_plain("batch", None)  # inside a transform all new tensors would be its own
        self.temperature = torch.zeros(slots + 1, dtype=torch.float32, device=device)
        self.vocab_size, self.slots, self.device = vocab_size, slots, self.temperature.device
        self.entries: list[Entry] = []
        self._states, self._scratch = list(range(slots)), Scratch(self.device)
        self.moves = 0
        self.thread = OneThread("batch", "give each thread a batch of its own")
        empty = self._none = Entry.of(NO_REQUEST, vocab_size)
        width = slots + 1 + -(slots + 1) % ALIGNED
        column = columns_of(empty.packed + bytes(8), STATE + 1, device=self.device)[:, :1]
        self.numbers = column.repeat(1, width)
        self.numbers[STATE] = torch.arange(width, device=self.device)
        self.chosen = self.numbers.new_full((slots + 1, 0), word.NO_TOKEN)
        self._note()

    def _view(self) -> None:
        count = len(self.entries)
        self.seed, self.occupancy = (self.numbers[i, : self.slots + 1] for i in (SEED, OCCUPANCY))
        # Kept, because torch.compile would compile anew for every length of a list it looks at.
        self.row_temperature, self.row_seed = self.temperature[:count], self.seed[:count]
        self._places = self.row_temperature.data_ptr(), self.row_seed.data_ptr()

    def require_places(self) -> None:
        """Raise a ValueError if a caller replaced or freed the memory of temperatures or seeds."""
        temperature, seed = self.row_temperature, self.row_seed
        now = temperature.data_ptr(), seed.data_ptr()
        if now == self._places and temperature.shape == seed.shape:
            return
        is_temperature = now[0] != self._places[0] or len(temperature) != len(self.entries)
        name, given = ("temperature", temperature) if is_temperature else ("seed", seed)
        require_memory("batch.temperature", self.temperature)
        require_memory("batch.seed", self.numbers)
        self._view()  # so that it is as it was
        raise ValueError(
            f"batch.{name}: stays in its place, and got other memory, as by batch.{name}.data = …, "
            f"which nothing reads: {describe(given)}; write batch.{name}[:] = values"
        )

    def flagged(self, flag: int) -> list[int]:
        """Return the slots with a flag."""
        return _flagged(self._flags, flag)

    @ordinary_tensors
    def arrange(self, order: list[int], joining: Sequence[Entry]) -> None:
        """Move the requests of these slots to the first slots, in this order.

        Args:
            order: the old slot of each new one, of n slots in use; n + i is joining request i.
        """
        entries, joined = self.entries, {}
        count = len(entries)
        if joining:
            joined = {slot: joining[old - count] for slot, old in enumerate(order) if old >= count}
        if order[:count] != list(range(count)):
            self._move(order, list(joined))
        self.entries = list(map([*entries, *joining].__getitem__, order))
        self.load(list(joined), list(joined.values()))

    @ordinary_tensors
    def begin(self, entries: Sequence[Entry]) -> None:
        """Take the first rows, whose requests have neither logprobs nor penalties."""
        self.entries = list(entries)
        packed = bytearray().join(map(_PACKED, entries)) or bytearray(8 * STATE)
        columns = torch.frombuffer(packed, dtype=torch.int64).view(-1, STATE).T
        self.numbers[:STATE, : len(entries)].copy_(columns[:, : len(entries)])
        self._note()

    def _note(self) -> None:
        """Note flags, plans and lists of rows that follow from the entries."""
        self._flags, self._features = bytes(map(_FLAGS, self.entries)), None
        self.plans: dict[tuple[int, ...], BatchPlan] = {}
        self.unseeded, self.empty = self.flagged(UNSEEDED), self.flagged(EMPTY)
        self.stores_logits = 1 in self._flags.translate(_HAS[FILTERED | ASKS_LOGPROBS])
        self._view()

    def _move(self, order: list[int], joined: list[int]) -> None:
        """Move the numbers of the slots: those that stay or join, then those not in use.

        Args:
            joined: the new slots of joining requests. Until their requests are written they hold
                the numbers of free slots.
        """
        self.moves += 1
        count, slots = len(self.entries), self.slots
        free = [*sorted(set(range(count)).difference(order)), *range(count, slots)]
        moved = list(order)
        for slot, old in zip(joined, free, strict=False):
            moved[slot] = old
        moved += free[len(joined) :]
        (index,) = tensors_of(moved, device=self.device)
        self.temperature[:slots].copy_(self.temperature.index_select(0, index))
        numbers = self.numbers
        if self.controls is None:
            numbers = numbers[:STATE]  # no slot has a state that would move along
        else:
            self.controls.forget([self._states[old] for old in free])
            self._states = list(map(self._states.__getitem__, moved))
        numbers[:, :slots].copy_(numbers.gather(1, index.expand(len(numbers), slots)))
        if self.chosen.shape[1]:
            self.chosen[:slots].copy_(self.chosen.index_select(0, index))
        if len(order) < slots:
            self.numbers[OCCUPANCY, len(order) : slots].fill_(VACANT)

    @ordinary_tensors
    def load(self, slots: Sequence[int], entries: Sequence[Entry]) -> None:
        """Write requests into some of the slots in use."""
        for slot, entry in zip(slots, entries, strict=True):
            self.entries[slot] = entry
        self.version += 1
        self._note()
        if not entries:
            return
        send = self._scratch.send
        packed = bytearray().join([entry.packed for entry in entries])
        columns = torch.frombuffer(packed, dtype=torch.int64).view(-1, STATE).T
        temperatures = [entry.params.temperature for entry in entries]
        (temperature_column,) = tensors_of(temperatures, device=None, dtype=torch.float32)
        index = send("slots", tensors_of(slots, device=None)[0])
        self.numbers[:STATE].index_copy_(1, index, send("numbers", columns))
        self.temperature.index_copy_(0, index, send("temperatures", temperature_column))
        chosen = [entry.params.logprob_token_ids or () for entry in entries]
        self.chosen = widened(self.chosen, word.NO_TOKEN, max(map(len, chosen)))
        if width := self.chosen.shape[1]:
            ids = padded(chosen, word.NO_TOKEN, width, torch.int64).view(-1, width)
            self.chosen.index_copy_(0, index, send("ids", ids))
        if any(needs_controls(entry.params) for entry in entries):
            self.make_controls()
        if self.controls is not None:
            self.controls.load([self._states[slot] for slot in slots], entries)

    @ordinary_tensors
    def draw_seeds(self, source: SeedSource) -> None:
        """Give slots that wait for their seed the next ones, unless the caller wrote others."""
        index = self._scratch.send("slots", tensors_of(self.unseeded, device=None)[0])
        written = self.seed.index_select(0, index)
        seeds = self._scratch.send("seeds", source.draw(len(self.unseeded)))
        self.seed.index_copy_(0, index, written.where(written != WAITING, seeds))
        for slot in self.unseeded:
            entry = self.entries[slot]
            self.entries[slot] = entry._replace(flags=entry.flags & ~UNSEEDED)
        self._note()

    def make_controls(self) -> ControlTables:
        """Return the tables of controls, which are made when they are first needed."""
        if self.controls is None:
            self.controls = ControlTables(self.slots, self.vocab_size, self.device)
        return self.controls

    def entries_of(self, slots: Sequence[int]) -> list[Entry]:
        """Return the entries of slots; the entry of S, which an undrawn row reads, is empty."""
        known = self.entries + [self._none] * (self.slots + 1 - len(self.entries))
        return list(map(known.__getitem__, slots))

    def slots_read_by(self, named: Sequence[int]) -> list[int]:
        """Return the slot that each row reads if the rows name these; S for an undrawn row."""
        taken, slots = set(self.empty), []
        for slot in named:
            drawn = 0 <= slot < len(self.entries) and slot not in taken
            slots.append(slot if drawn else self.slots)
            taken.add(slot)
        return slots

    def plan(self, slots: Sequence[int], entries: Sequence[Entry], **options: Any) -> BatchPlan:
        """Return the plan of a step whose rows read these slots.

        Args:
            entries: those of the slots, as `entries_of` returns them.
            options: kept_cap and fixed_rounds of `BatchPlan`.
        """
        filters = logprobs = None
        keeps = options.get("kept_cap") is not None
        flags = bytes(map(_FLAGS, entries)) if self.stores_logits or keeps else b""
        # Only by its logits is it known whether a row without filters kept all ids.
        if rows := list(range(len(entries))) if keeps else _flagged(flags, FILTERED):
            known = not _flagged(flags, UNKNOWN)
            if known and not keeps:  # rows of one method stand together, so that none is copied
                rows.sort(key=lambda row: _FILTERS(entries[row]).demand.method_index)
            kinds = [_FILTERS(entries[row]) for row in rows]
            if not known:
                kinds = [keeps_all(self.vocab_size), *set(kinds)]
                options |= {"fixed_rounds": True, "stores_all": True}
            index, _, columns = self._columns(rows, slots)
            filters = RowFilters(index, rows, columns, kinds, known)
        if rows := _flagged(flags, ASKS_LOGPROBS):
            index, of_slot, columns = self._columns(rows, slots)
            asking = [self.entries[slot].params for slot in self.flagged(ASKS_LOGPROBS)]
            width = max(len(request.logprob_token_ids or ()) for request in asking)
            chosen = self.chosen.index_select(0, of_slot)[:, :width]
            top, modes = self.batch_features[1], [entries[row].processed for row in rows]
            bits = columns[ASKS:TOP, : len(rows)] != 0
            logprobs = LogprobRows(
                rows, index, top, columns[TOP, : len(rows)], chosen, modes, *bits[1:]
            )
        requests = tuple(map(_PARAMS, entries))
        of_batch = len(requests), self.vocab_size, self.device
        return BatchPlan(*of_batch, filters, logprobs, requests, **options)

    def _columns(self, rows: list[int], slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of some rows, the slots that they read, and the numbers of these slots
        up to TOP. The numbers are padded as `columns_of` pads."""
        padded_rows = rows + rows[:1] * (-len(rows) % ALIGNED)
        slots_read = [slots[row] for row in padded_rows]
        index, of_slot = tensors_of(rows, slots_read, device=self.device)
        return index, of_slot[: len(rows)], self.numbers[:OCCUPANCY].index_select(1, of_slot)

    @property
    def batch_features(self) -> tuple[set[RowFilter], int, bool]:
        """The filters of all slots that have some; the most tokens that one reports, -1 if none
        asks for logprobs; and whether one asks in a processed mode."""
        if self._features is None:
            asking = [self.entries[slot] for slot in self.flagged(ASKS_LOGPROBS)]
            self._features = (
                {self.entries[slot].filters for slot in self.flagged(FILTERED)},
                max((entry.top for entry in asking), default=-1),
                any(entry.processed for entry in asking),
            )
        return self._features

    @property
    def launches(self) -> tuple[object, ...]:
        """A value to compare: for equal values a step of any slots makes equal launches."""
        filters, top, processed = self.batch_features
        demands = [row_filter.demand for row_filter in filters]
        return (
            *(top, processed, self.chosen.shape[1]),
            Demand.of_any(demands),
            Demand.of_any(demand for demand in demands if not demand.first),
            *(self.moves, self.make_controls().launches),
        )


def _flagged(flags: bytes, flag: int) -> list[int]:
    """Return the indices of the bytes in which a flag is set."""
    has = flags.translate(_HAS[flag])
    return list(compress(range(len(has)), has)) if 1 in has else []
