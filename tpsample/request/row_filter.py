"""The filters of one request: their numbers as steps read them, and what they need."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.rules import ENDING, TOP_K, TOP_P, behind_top_p
from tpsample.core.word import LOWEST_DRAWABLE
from tpsample.request.params import SamplingParams

MAX_TOP_WORDS, MAX_WEIGHED_WORDS = 256, 1024
"""Largest top_k whose tokens are worth exchanging: the first alone, the second with a top_p of what
the top_k leaves. A larger top_k alone is nearly always decided by the best scores, for fewer bytes.
With such a top_p only a search decides it, in six exchanges. The second number is also the length
of the longest list of tokens that a top_p keeps."""

FEW_LOGPROBS = 32
"""Tokens of a row whose logprobs take smaller kernels than more of them."""

LOWEST = "the least word that can be drawn"
BY_FIRST_WORDS = "by first words"
SEARCHED = "searched"
KEEP_TIES = "keep_ties"
"""Names of columns beside those of the rules."""

BEST_SCORES = 8
"""Candidates of the rejection. On real logits at T = 1 none of 8 was kept for fewer than 0.3 % of
rows with top_p."""
MANY_BEST_SCORES, SMALL_TOP_P = 32, 0.35
"""A row with a smaller top_p has more candidates where a rank stores upper ends, and a row with a
top_k has half as many. Of a flat row with top_p 0.1 none of 8 is kept with probability 0.9^8 =
0.43, and none of 32 with 0.03. Each candidate more costs a CPU about 9 exact logits."""


class Method(Enum):
    """How the token of a filtered row is found; see `tpsample.filters.sample`."""

    FIRST_WORDS = "first words"
    REJECTION = "rejection"
    SEARCH = "search"


_METHODS = tuple(Method)


class Demand(NamedTuple):
    """The needs of one filtered row, or of any of several, to find its token on shards.

    `tpsample.filters.sample` has the methods. The host chooses launches by nothing else.

    Attributes:
        first: k, if the first k order words of each rank decide the row; 0 if the best scores or a
            search do.
        total: whether top_p takes a share of a mass that has tokens beyond those first k.
        searched: whether only a search for the last kept token decides the row.
        counts, masses: whether that search counts tokens for top_k, and weighs them for top_p.
        ends: names of the rules of `ENDING` that are on.
        most, least: k and y = (x - max x) / T, if they bound how many logits a rank needs; else 0
            and -inf.
        exact: whether sums over bounds of its logits are not enough.
    """

    first: int = 0
    total: bool = False
    searched: bool = False
    counts: bool = False
    masses: bool = False
    ends: frozenset[str] = frozenset()
    most: int = 0
    least: float = -math.inf
    exact: bool = False

    @property
    def method(self) -> Method:
        """The method that the row begins with where the host may read from the device."""
        if self.first:
            return Method.FIRST_WORDS
        return Method.SEARCH if self.searched else Method.REJECTION

    @property
    def method_index(self) -> int:
        """The index of its method among those of a step."""
        return _METHODS.index(self.method)

    @property
    def few(self) -> bool:
        """Whether a rank needs few of its logits."""
        return self.most > 0 or self.least > -math.inf

    @property
    def weighed(self) -> bool:
        """Whether tokens of the row are counted or weighed, beside those that win."""
        return self.counts or self.masses

    @property
    def rough(self) -> bool:
        """Whether sums over bounds of all logits nearly always decide the row."""
        summed = self.total or not self.first
        listed = 0 < self.most <= MAX_TOP_WORDS
        return summed and not (self.searched or self.exact or listed)

    def listing(self, count: int) -> Demand:
        """Return the demand of the row if its first `count` tokens are reported, kept or not."""
        if not count:
            return self
        listed = self.most > 0 and count <= MAX_TOP_WORDS
        return self._replace(most=max(self.most, count) if listed else 0, least=-math.inf)

    @staticmethod
    def of_any(demands: Iterable[Demand]) -> Demand:
        """Return the union of demands. Batches with equal unions make the same launches."""
        union = Demand()
        for demand in demands:
            union = Demand(
                max(union.first, demand.first),
                union.total | demand.total,
                union.searched | demand.searched,
                union.counts | demand.counts,
                union.masses | demand.masses,
                union.ends | demand.ends,
            )
        return union


class RowFilter(NamedTuple):
    """The filters of one row, as `RowFilters` has them.

    Attributes:
        ends: the numbers of `ENDING`, as steps read them.
        behind: whether top_k, and each of `ENDING`, stands behind top_p.
    """

    top_k: int
    top_p: float
    ends: tuple[float, ...]
    keep_ties: bool
    behind: tuple[bool, ...]
    demand: Demand

    @staticmethod
    def of(request: SamplingParams, vocab_size: int) -> RowFilter:
        """Return the filters of a request, `keeps_all` if it has none."""
        nothing, behind = keeps_all(vocab_size), behind_top_p(request.filter_order)
        top_k, top_p, *others = (
            rule.read(getattr(request, rule.name), vocab_size) for rule in (TOP_K, TOP_P, *ENDING)
        )
        row_filter = RowFilter(
            int(top_k), top_p, tuple(others), request.ties == "keep", behind, Demand()
        )
        # The argmax of a greedy row is always kept.
        if request.greedy or row_filter[:3] == nothing[:3]:
            return nothing
        return row_filter._replace(demand=row_filter._demand(nothing))

    def _demand(self, nothing: RowFilter) -> Demand:
        """Return the demand of the row.

        A filter keeps the first tokens of an order, and top_p a share of the mass that the rules
        before it leave. So a rank needs few logits if all weighed tokens lie among the first k, or
        at a known y or above. If both bounds hold, the tokens lie within both. A top_k <= 256 after
        top_p needs one more number, the mass of all tokens.
        A rule after top_p is no bound while top_p is on, because top_p weighs tokens that the rule
        removes. No rule is a bound beside one that needs all logits.
        """
        counts, masses = self.top_k < nothing.top_k, self.top_p < 1
        on = [i for i, end in enumerate(self.ends) if end != nothing.ends[i]]
        known = all(ENDING[i].known for i in on)
        top_k_behind, *behind = (is_behind and masses for is_behind in self.behind)
        within_top_k = counts and not top_k_behind
        worth_sending = MAX_WEIGHED_WORDS if masses and within_top_k else MAX_TOP_WORDS
        by_first = counts and self.top_k <= worth_sending
        least = [self.ends[i] for i in on if known and not behind[i]]
        return Demand(
            first=self.top_k if by_first and not self.keep_ties else 0,
            total=by_first and top_k_behind and not self.keep_ties,
            searched=within_top_k and masses and (self.keep_ties or not by_first),
            counts=counts,
            masses=masses,
            ends=frozenset(ENDING[i].name for i in on),
            most=self.top_k if known and within_top_k else 0,
            least=max(least, default=-math.inf),
            exact=not known,
        )

    @property
    def num_best(self) -> int:
        """How many candidates of the rejection are found while upper ends are stored."""
        if self.top_p < SMALL_TOP_P:
            return MANY_BEST_SCORES
        return MANY_BEST_SCORES // 2 if self.demand.counts else BEST_SCORES

    def packed(self) -> bytes:
        """Return the filter as the device reads it: `COLUMNS` numbers of 8 bytes."""
        numbers = LOWEST_DRAWABLE, self.top_k, self.top_p, *self.ends
        ways = self.demand.first > 0, self.demand.searched
        return struct.pack(_FORMAT, *numbers, self.keep_ties, *self.behind, *ways)


@cache
def keeps_all(vocab_size: int) -> RowFilter:
    """Return the filter of an unfiltered row in a batch where others may have filters."""
    ends = tuple(rule.read(rule.off, vocab_size) for rule in ENDING)
    return RowFilter(vocab_size, 1.0, ends, False, (False,) * (1 + len(ends)), Demand())


def behind(name: str) -> str:
    """Return the name of the column that says whether a rule stands behind top_p."""
    return f"{name} behind top_p"


_ENDING = tuple(rule.name for rule in ENDING)
_INTEGERS = (LOWEST, TOP_K.name)
_REALS = (TOP_P.name, *_ENDING)
BITS = (KEEP_TIES, *map(behind, (TOP_K.name, *_ENDING)), BY_FIRST_WORDS, SEARCHED)
_COLUMN_INDEX = {name: index for index, name in enumerate((*_INTEGERS, *_REALS, *BITS))}
_FORMAT = f"={len(_INTEGERS)}q{len(_REALS)}d{len(BITS)}q"
COLUMNS = len(_COLUMN_INDEX)
"""Numbers per row in the tensor of `RowFilters`."""


def column_of(columns: Tensor, name: str) -> Tensor:
    """Return a column by name: float64 of a rule, int64 of top_k and of all others."""
    column = columns[_COLUMN_INDEX[name]]
    return column.view(torch.float64) if name in _REALS else column
