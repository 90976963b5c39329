"""Where the filters of stored rows end: the rules' order words, from facts over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core.rules import ENDING, TOP_K
from tpsample.core.spread import spread_of
from tpsample.core.word import LOWEST_DRAWABLE
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, Thresholds
from tpsample.request.row_filter import LOWEST, behind


def thresholds_of(rows: ShardLogits, filters: RowFilters, ranks: Ranks) -> Thresholds:
    """Return the thresholds of filtered rows. It is collective if one of their rules needs sums.

    Args:
        rows: with their largest logits, if a rule of `ENDING` is on.
    """
    lowest = least = of_total = filters.column(LOWEST)
    if not filters.demand.ends:
        return filters.thresholds(lowest, lowest)
    facts = _OverRanks(rows, ranks)
    for rule in ENDING:
        if rule.name not in filters.demand.ends:
            continue
        assert rule.end is not None
        word = rule.end(facts, filters.column(rule.name))
        least = word if least is lowest else least.maximum(word)
        if filters.demand.masses:
            in_total = word.masked_fill(filters.column(behind(rule.name)), LOWEST_DRAWABLE)
            of_total = in_total if of_total is lowest else of_total.maximum(in_total)
    return filters.thresholds(least, of_total)


def thresholds_of_first(
    rows: ShardLogits, first: Tensor, filters: RowFilters, ranks: Ranks
) -> list[Thresholds]:
    """Return the thresholds of rows that know their first words over all ranks, int64 [F, k].

    If this rank stored upper bounds of logits, there are two: one for a lower and one for an upper
    bound of the total. Collective if a row takes a share of the mass of all tokens.
    """
    demand = filters.demand
    if demand.ends or demand.total:
        rows = replace(rows, top=rows.top_of(first.unsqueeze(0))[1])
    thresholds = thresholds_of(rows, filters, ranks)
    if not demand.total:
        return [thresholds]
    totals = ranks.sum_integers(rows.totals(thresholds.least_of_total))
    of_others = filters.column(behind(TOP_K.name))
    return [thresholds._replace(total=total.where(of_others, -1)) for total in totals.unbind(dim=1)]


@dataclass(frozen=True)
class _OverRanks:
    """`tpsample.core.rules.FilteredRows` of logits on shards."""

    rows: ShardLogits
    ranks: Ranks

    @property
    def temperature(self) -> Tensor:
        return self.rows.temperature

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        return self.rows.least_word(y, temperature)

    def total_mass(self) -> Tensor:
        return self.ranks.sum_integers(self.rows.mass_from(self._lowest()))

    def total_moment(self) -> tuple[Tensor, Tensor]:
        mass, moment = self.ranks.sum_integers(self.rows.weigh(self._lowest())).unbind(1)
        return mass, moment

    def least_of_mass(self, limit: Tensor) -> Tensor:
        least = self.ranks.gather_integers(self.rows.least_of_mass(limit)).amin(dim=0)
        # A row without a limit may store bounds of logits in place of the logits.
        return least.where(limit > 0, LOWEST_DRAWABLE)

    def spread(self) -> Tensor:
        return spread_of(self.ranks.sum_integers(self.rows.spread()))

    def _lowest(self) -> Tensor:
        return torch.full_like(self.rows.largest, LOWEST_DRAWABLE, dtype=torch.int64)
