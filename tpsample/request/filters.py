"""The filters and logprobs of a batch's rows, as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.row_noise import has_all
from tpsample.core.rules import TOP_K, TOP_P
from tpsample.core.tensors import ALIGNED, ordinary_tensors, tensors_of
from tpsample.request.row_filter import BITS, KEEP_TIES, Demand, Method, RowFilter, column_of


class Thresholds(NamedTuple):
    """Where the filters of F rows end, as a pass over logits needs it.

    A token is kept if its order word is at least `least`, and fewer than `most` tokens stand before
    it. Less than `share` of the total must stand before it, too.

    Attributes:
        most: int64 [F]; V keeps all.
        share: float64 [F]; 1 keeps all. Not fp32, because 0.1 of ten equal tokens is one.
        least: int64 [F], above every word masked tokens have.
        least_of_total: int64 [F]; the total is the mass of the tokens from this word on. Unless
            best scores decide the row, these are at most `most` tokens.
        keep_ties: int64 [F], 1 where only greater logits stand before a token.
        counts: whether `most` may cut some row.
        total: int64 [F], the totals of rows whose total has more tokens than their first words; -1
            in other rows. None if there are no such rows.
    """

    most: Tensor
    share: Tensor
    least: Tensor
    least_of_total: Tensor
    keep_ties: Tensor
    counts: bool
    total: Tensor | None = None


@dataclass(frozen=True)
class RowFilters:
    """The filters of the F rows of a batch that have any, on the device and on the host.

    All of a row's numbers lie in one tensor, so that rows are sent, and picked, in one operation.

    Attributes:
        row_index, row_list: int64 [F] and a list, the rows' indices in the batch.
        columns: int64 [`COLUMNS` or more, F or more], the bits of the numbers of
            `RowFilter.packed`; see `columns_of`.
        kinds: the filters that may occur.
        known: whether `kinds` lists the filter of each row in order. If not, the host does not know
            the rows, and any row may have any kind.
    """

    row_index: Tensor
    row_list: list[int]
    columns: Tensor
    kinds: list[RowFilter]
    known: bool = True

    def __len__(self) -> int:
        return len(self.row_list)

    def column(self, name: str) -> Tensor:
        """Return a column [F] by name: float64 of a rule, int64 of top_k and LOWEST, else bool."""
        column = self._view_of(name)
        # It is not kept, because memory of a step inside torch.compile belongs to the compiler.
        return column != 0 if name in BITS else column

    def _view_of(self, name: str) -> Tensor:
        """Return a column [F] by name: float64 of a rule, and else int64."""
        if name not in self._views:  # a view takes the host longer than a launch
            self._views[name] = column_of(self.columns, name)[: len(self.row_list)]
        return self._views[name]

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        """The columns that were asked for."""
        return {}

    @cached_property
    def demand(self) -> Demand:
        """The needs of these rows together."""
        return Demand.of_any({kind.demand for kind in self.kinds})

    @cached_property
    def unfiltered(self) -> list[int]:
        """The indices of rows without filters, which the host must know."""
        return [index for index, kind in enumerate(self.kinds) if kind.demand == Demand()]

    @cached_property
    def by_first_words(self) -> set[bool]:
        """Whether rows begin with their first words: both answers, if some do and some do not."""
        return {bool(demand.first) for demand in {kind.demand for kind in self.kinds}}

    def thresholds(self, least: Tensor, least_of_total: Tensor) -> Thresholds:
        """Return the thresholds of the rows whose `ENDING` rules end at these order words."""
        top_k, top_p, ties = map(self._view_of, (TOP_K.name, TOP_P.name, KEEP_TIES))
        return Thresholds(top_k, top_p, least, least_of_total, ties, self.demand.counts)

    def select(self, index: list[int], selected: Tensor | slice) -> RowFilters:
        """Return some of the filtered rows, without a copy if they stand one behind the other.

        Args:
            selected: the same as `index_of` returns it.
        """
        if has_all(selected, len(self)):
            return self
        padded = selected
        if isinstance(padded, Tensor):
            padded = F.pad(padded, (0, -len(index) % ALIGNED))
        return RowFilters(
            self.row_index[selected],
            [self.row_list[row] for row in index],
            self.columns[:, padded],
            [self.kinds[row] for row in index] if self.known else self.kinds,
            self.known,
        )

    @cached_property
    @ordinary_tensors
    def methods(self) -> list[tuple[Method, Tensor | slice, RowFilters]]:
        """Each method with the rows that begin with it: their indices among these, their filters.

        The list is made once, so that no step sends an index to the device.
        """
        by_method = []
        for method in Method:
            index = [i for i, kind in enumerate(self.kinds) if kind.demand.method is method]
            if index:
                selected = index_of(index, self.columns.device)
                by_method.append((method, selected, self.select(index, selected)))
        return by_method


@dataclass(frozen=True)
class LogprobRows:
    """The R rows of a batch that may ask for logprobs, and their requests for them.

    Attributes:
        row_list, row_index: a list and int64 [R], the rows' indices in the batch.
        top: the largest N that a row asks for.
        top_of: int64 [R], N of each row.
        chosen: int64 [R, C], the ids asked for, -1 where a row has fewer.
        processed_list, processed: a list and bool [R], whether a row's mode is a processed one.
        as_logits: bool [R], whether its mode is of logits.
        asks: bool [R], whether a row asks at all; None if every one does. If the host does not
            know the rows, every row is listed.
        places: int64 [R], the rows' places among the stored ones, or a slice.
        filters: of the rows that have filters and a processed mode; None if there are none.
        filtered: int64, the places of the rows in `filters` among the R, or a slice.
        of_filters: the same among the filtered rows of the batch.
        unfiltered: whether none of the R rows is filtered.
    """

    row_list: list[int]
    row_index: Tensor
    top: int
    top_of: Tensor
    chosen: Tensor
    processed_list: list[bool]
    processed: Tensor
    as_logits: Tensor
    asks: Tensor | None = None
    places: Tensor | slice = field(default_factory=lambda: slice(None))
    filters: RowFilters | None = None
    filtered: Tensor | slice | None = None
    of_filters: Tensor | slice = field(default_factory=lambda: slice(None))
    unfiltered: bool = False

    def with_indices(self, stored: list[int], filters: RowFilters | None) -> LogprobRows:
        """Return these rows with their indices among the stored rows and the filtered rows.

        They are computed with the plan, so that no step sends an index to the device.
        """
        index_of_row = {row: i for i, row in enumerate(stored)}
        of_row = {row: i for i, row in enumerate(filters.row_list)} if filters else {}
        asking = enumerate(zip(self.row_list, self.processed_list, strict=True))
        filtered = [i for i, (row, processed) in asking if processed and row in of_row]
        own = [of_row[self.row_list[i]] for i in filtered]

        device = self.row_index.device
        stored_rows = replace(
            self,
            places=index_of([index_of_row[row] for row in self.row_list], device),
            unfiltered=of_row.keys().isdisjoint(self.row_list),
        )
        if filters is None or not own:
            return stored_rows
        of_filters = index_of(own, device)
        return replace(
            stored_rows,
            filters=filters.select(own, of_filters),
            filtered=index_of(filtered, device),
            of_filters=of_filters,
        )


def lists_all(index: list[int], count: int) -> bool:
    """Return whether an index lists all of `count` rows in order, so that no row has to move."""
    return index == list(range(count))


def index_of(index: list[int], device: torch.device) -> Tensor | slice:
    """Return an index on the device, or a slice if the rows are consecutive.

    A list as an index would make torch copy it to the device, and wait.
    """
    first = index[0] if index else 0
    if index == list(range(first, first + len(index))):
        return slice(first, first + len(index))
    return tensors_of(index, device=device)[0]
