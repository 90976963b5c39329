"""The stored rows of a step by how many of their logits a rank needs.

bounded    few logits decide (`Demand.few`)
rough      upper bounds of the logits nearly always decide (`Demand.rough`)
whole      all logits are needed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from tpsample.request.plan import BatchPlan
from tpsample.request.row_filter import Demand


class StoredRows(NamedTuple):
    """Some stored rows, and their places among all stored ones; int64 each."""

    rows: np.ndarray
    places: np.ndarray


class RowKinds:
    """The rows of a plan by kind.

    Attributes:
        plain: int64, the rows of the batch that store no logits.
        bounded, rough: demands of such filtered rows, by their place among the stored rows.
        bounded_rows, rough_rows, whole_rows: the stored rows of each kind.
        drawn_rows: whole rows whose words no filter replaces.
        most, least: of the bounded rows, int64 and float64; see `Demand`.
        num_best: how many best scores per sample a rank finds of each rough row.
    """

    def __init__(self, plan: BatchPlan) -> None:
        stored, replaced = plan.stored_list, plan.replaced
        self.rough = dict(_rough(plan))
        self.bounded = {
            place: demand for place, demand in _bounded(plan) if place not in self.rough
        }
        whole = sorted(set(range(len(stored))).difference(self.bounded, self.rough))

        def at(places: Iterable[int]) -> StoredRows:
            listed = np.array([*places], np.int64)
            return StoredRows(np.array(stored, np.int64)[listed], listed)

        self.plain = np.array(sorted(set(range(plan.num_rows)).difference(stored)), np.int64)
        self.bounded_rows, self.rough_rows = at(self.bounded), at(self.rough)
        self.whole_rows = at(whole)
        self.drawn_rows = at(place for place in whole if stored[place] not in replaced)
        self.most = np.array([demand.most for demand in self.bounded.values()], np.int64)
        self.least = np.array([demand.least for demand in self.bounded.values()], np.float64)
        self.num_best = _num_best(plan, self.rough)


def _filtered(plan: BatchPlan) -> Iterator[tuple[int, int, Demand]]:
    """Yield the place, the row and the demand of each filtered row; nothing if all logits are
    stored. Filtered rows come first among the stored ones."""
    if plan.filters is not None and not plan.stores_all:
        rows = zip(plan.filters.row_list, plan.filters.kinds, strict=True)
        for place, (row, row_filter) in enumerate(rows):
            yield place, row, row_filter.demand


def _bounded(plan: BatchPlan) -> Iterator[tuple[int, Demand]]:
    """Yield the place and the demand of each row that needs few logits.

    Kept sets, and logprobs of them, need only the logits that the row's token needs.
    """
    logprobs, processed = plan.logprobs, {}
    if logprobs is not None:
        processed = dict(zip(logprobs.row_list, logprobs.processed_list, strict=True))
    for place, row, demand in _filtered(plan):
        if logprobs is not None and row in processed:
            of_all = logprobs.chosen.shape[1] > 0 or not processed[row]
            demand = Demand() if of_all else demand.listing(logprobs.top)
        if demand.few:
            yield place, demand


def _rough(plan: BatchPlan) -> Iterator[tuple[int, Demand]]:
    """Yield the place and the demand of each row that bounds of its sums nearly always decide.

    There are none in fixed rounds, because a row that the bounds leave open takes one round more.
    Nor are rows with logprobs, whose logits are read again. A kept set of all ids is only counted.
    """
    asking = set() if plan.logprobs is None else set(plan.logprobs.row_list)
    for place, row, demand in () if plan.fixed_rounds else _filtered(plan):
        decided = demand.rough
        if plan.kept_cap is not None:
            decided = demand == Demand() and not plan.requests[row].greedy
        if decided and row not in asking:
            yield place, demand


def _num_best(plan: BatchPlan, rough: Iterable[int]) -> int:
    """Return the number of best scores. With a `kept_cap` the rough rows keep all tokens, and the
    best score is drawn."""
    if plan.filters is None:
        return 0
    filters = plan.filters.kinds
    each = (1 if plan.kept_cap is not None else filters[place].num_best for place in rough)
    return max(each, default=0)


_KINDS: WeakKeyDictionary[BatchPlan, RowKinds] = WeakKeyDictionary()


def kinds_of(plan: BatchPlan) -> RowKinds:
    """Return the rows of a plan by kind, which are found once for each plan."""
    kinds = _KINDS.get(plan)
    if kinds is None:
        kinds = _KINDS[plan] = RowKinds(plan)
    return kinds
