"""How a step treats its rows, and what it reads of them: both frozen.

A `BatchPlan` follows from the requests alone. When they change a new plan replaces it, so no part
of a plan can belong to other rows. A `BatchView` is made for one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.digest import digest_text
from tpsample.core.tensors import capturing, ordinary_tensors, tensors_of
from tpsample.request.controls.apply import ControlRows
from tpsample.request.filters import LogprobRows, RowFilters, lists_all
from tpsample.request.params import SamplingParams


class Undrawn(NamedTuple):
    """The rows of a step that are not drawn.

    Attributes:
        rows: bool [B].
        bad: bool [B], undrawn rows that name an invalid slot; other undrawn rows are padding.
    """

    rows: Tensor
    bad: Tensor


class FilteredWords(NamedTuple):
    """The score words of filtered rows, which replace the words that the local step found.

    Attributes:
        words: int64 [F, num_samples], of the filtered rows over all ranks.
        place: int32 [B], the index of each row in `words`. An unfiltered row has -1, or F or more.
    """

    words: Tensor
    place: Tensor


class SlotRows(NamedTuple):
    """The rows of a selection, in memory that each step writes anew.

    Attributes:
        slots: int64 [B], the slot that each row reads; S for a row that is not drawn.
        undrawn: the rows that are not drawn.
        temperature, seed: fp32 and int64 [B], copied from the slots.
    """

    slots: Tensor
    undrawn: Undrawn
    temperature: Tensor
    seed: Tensor


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """How a step treats its rows, as far as the host knows their requests.

    Attributes:
        num_rows: B.
        vocab_size: V.
        device: of the batch.
        filters: the rows with filters, all rows with `kept_cap`; None if there are none.
        logprobs: the rows that ask for logprobs, found among the others; None if there are none.
        requests: of every row that is not a draft; empty if the host does not know the rows.
        kept_cap: most tokens of a kept set that a step reports; None reports none.
        fixed_rounds: a step with filters never waits for the device.
        stores_all: a step keeps every row's logits, whether the request needs them or not.
        numbers: 0 … B - 1 as int64 and int32 [B], if the caller has made them already.
        stored_list, stored_index: the rows whose logits every rank stores, as a list and int64;
            [] and None if there are none. They are all rows in order with `stores_all`. Otherwise
            the filtered rows come first.
        stored_place: int32 [B], the index of each row in that list, or -1; None if it is empty.
        filtered_place: int32 [B], the index of each row in `filters`. An unfiltered row has -1, or
            F or more. None without filters.
    """

    num_rows: int
    vocab_size: int
    device: torch.device
    filters: RowFilters | None = None
    logprobs: LogprobRows | None = None
    requests: tuple[SamplingParams, ...] = ()
    kept_cap: int | None = None
    fixed_rounds: bool = False
    stores_all: bool = False
    numbers: tuple[Tensor, Tensor] | None = None
    stored_list: list[int] = field(init=False)
    stored_index: Tensor | None = field(init=False)
    stored_place: Tensor | None = field(init=False)
    filtered_place: Tensor | None = field(init=False)

    @ordinary_tensors
    def __post_init__(self) -> None:
        """Find the stored rows now, because a step that is captured sends nothing to the device."""
        filters, logprobs = self.filters, self.logprobs
        rows = list(range(self.num_rows)) if self.stores_all else []
        rows += [*(filters.row_list if filters else ()), *(logprobs.row_list if logprobs else ())]
        stored = list(dict.fromkeys(rows))
        if logprobs is not None:
            vars(self).update(logprobs=logprobs.with_indices(stored, filters))
        index, index_of_row = self._index_stored(stored) if stored else (None, None)
        vars(self).update(stored_list=stored, stored_index=index, stored_place=index_of_row)
        place = None if filters is None else index_of_row
        if filters is not None and self.stores_all and len(filters) < self.num_rows:
            place = self._places_of(filters.row_index)
        vars(self).update(filtered_place=place)

    def _index_stored(self, stored: list[int]) -> tuple[Tensor, Tensor]:
        """Return the stored rows as a tensor, and the index of each row among them."""
        device, filters = self.device, self.filters
        if lists_all(stored, self.num_rows):
            if self.numbers is not None:
                return self.numbers
            index = torch.arange(self.num_rows, device=device)
            return index, index.to(torch.int32)
        if filters is not None and len(filters) == len(stored):
            index = filters.row_index
        else:
            (index,) = tensors_of(stored, device=device)
        return index, self._places_of(index)

    def _places_of(self, index: Tensor) -> Tensor:
        """Return the index of each row in a tensor of rows, int32 [B], or -1."""
        order = torch.arange(len(index), dtype=torch.int32, device=self.device)
        none = torch.full((self.num_rows,), -1, dtype=torch.int32, device=self.device)
        return none.index_copy_(0, index, order)

    @cached_property
    def stores_in_order(self) -> bool:
        """Whether the stored rows are all rows in their own order."""
        return lists_all(self.stored_list, self.num_rows)

    @cached_property
    def filtered_places(self) -> slice | Tensor:
        """The places of the filtered rows among the stored ones, in the order of `filters`."""
        assert self.filters is not None
        count = len(self.filters.row_list)
        if self.stores_all and count < self.num_rows:
            return self.filters.row_index
        return slice(0, count)

    @cached_property
    def storing_every_row(self) -> BatchPlan:
        """The plan that keeps the logits of all of these rows on their ranks, in order."""
        return replace(self, stores_all=True)

    @cached_property
    def in_fixed_rounds(self) -> BatchPlan:
        """This plan for steps that never wait. It takes no new memory on the device, because memory
        that a step inside torch.compile takes belongs to the compiler."""
        plan = object.__new__(BatchPlan)
        vars(plan).update({field.name: vars(self)[field.name] for field in fields(self)})
        vars(plan).update(fixed_rounds=True, drawn=self.drawn)
        return plan

    @cached_property
    def by_cuts(self) -> bool:
        """Whether the tokens of filtered rows follow from where their kept sets end.

        Kept sets, and processed logprobs of all filtered rows, need these ends anyway. Where first
        words decide all rows, they also hold the words of the logprobs.
        """
        if self.kept_cap is not None:
            return True
        if self.logprobs is None or self.filters is None:
            return False
        of_logprobs = self.logprobs.filters
        processed = of_logprobs is not None and len(of_logprobs) == len(self.filters)
        all_ask = self.logprobs.row_list == self.filters.row_list
        return processed or (all_ask and self.filters.by_first_words == {True})

    @property
    def replaced(self) -> set[int]:
        """The rows whose words a filter replaces; none if all rows are stored, and so drawn."""
        return set() if self.filters is None or self.stores_all else set(self.filters.row_list)

    @cached_property
    @ordinary_tensors
    def drawn(self) -> Tensor | None:
        """int64, the rows whose words the local step has to find, in order; None for all."""
        rows = sorted(set(range(self.num_rows)).difference(self.replaced))
        return None if len(rows) == self.num_rows else tensors_of(rows, device=self.device)[0]

    @cached_property
    def text(self) -> str:
        """The plan as a text, which is equal on two ranks if their plans are equal."""
        rows = [f"row {row}: {request.text}" for row, request in enumerate(self.requests)]
        options = f"kept_cap={self.kept_cap}, fixed_rounds={self.fixed_rounds}"
        return "\n".join([*rows, options, f"storing {self.stored_list}"])

    @cached_property
    def digest(self) -> int:
        """64 bits of the text."""
        return digest_text(self.text)


class BatchView(NamedTuple):
    """The rows that a step reads: those of a batch, or each row once per drafted position.

    Attributes:
        temperature: fp32 [B]; below 1e-5 the row is greedy.
        seed: int64 [B], 64 bits.
        plan: of these rows.
        controls: penalties and constraints of the rows; None if there are none.
        undrawn: the rows that are not drawn; None if all are.
    """

    temperature: Tensor
    seed: Tensor
    plan: BatchPlan
    controls: ControlRows | None = None
    undrawn: Undrawn | None = None

    @property
    def rows(self) -> int:
        """B."""
        return self.seed.shape[0]

    @property
    def _undrawn_rows(self) -> Undrawn | None:
        """The rows that are not drawn, under the name that a batch has for them."""
        return self.undrawn

    @property
    def _stores_logits(self) -> bool:
        """Whether a step keeps logits of some of these rows on their ranks."""
        return self.plan.stored_index is not None

    @property
    def may_read(self) -> bool:
        """Whether the host may read from the device what a step of these rows has found."""
        return not (self.plan.fixed_rounds or capturing(self.device))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.plan.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.seed.device

    def _view_of(self, num_rows: int) -> BatchView:
        """Return this view.

        Raises:
            ValueError: it has another number of rows.
        """
        if num_rows != self.rows:
            raise ValueError(
                f"batch: expected {num_rows} rows, as hidden_states or logits have, got {self.rows}"
            )
        return self
