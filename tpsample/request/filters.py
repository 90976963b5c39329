"""The filters and logprobs of a batch's rows as tensors, and how filtered rows find a token."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.tensors import ALIGNED, ordinary_tensors, tensors_of
from tpsample.request.params import SamplingParams

MAX_TOP_WORDS = 256
"""Largest top_k whose tokens are worth exchanging."""

BEST_SCORES = 8
"""Candidates of the rejection. On real logits at T = 1 none of 8 was kept for fewer than 0.3 % of
rows with top_p."""


class Way(Enum):
    """How a filtered row finds its token on shards; see `tpsample.filters.sample`."""

    TOP_WORDS = "top words"
    REJECTION = "rejection"
    THRESHOLD = "threshold"


class RowFilter(NamedTuple):
    """The filters of one row, as `RowFilters` has them."""

    top_k: int
    top_p: float
    log_min_p: float
    total_log_min_p: float
    keep_ties: bool
    joint: bool
    way: Way

    @staticmethod
    def of(request: SamplingParams, vocab_size: int) -> RowFilter:
        """Return the filters of a request, `keeps_all` if it has none."""
        top_k = vocab_size if request.top_k < 1 else min(request.top_k, vocab_size)
        log_min_p = math.log(request.min_p) if request.min_p > 0 else -math.inf
        of_total = -math.inf if request.filter_order == "min_p_last" else log_min_p
        bits = request.ties == "keep", request.filter_order == "joint"
        way = _way(top_k, request.top_p, *bits, vocab_size)
        found = RowFilter(top_k, request.top_p, log_min_p, of_total, *bits, way)
        # The argmax of a greedy row is always kept.
        takes_some = found.takes_some(vocab_size) and not request.greedy
        return found if takes_some else keeps_all(vocab_size)

    def takes_some(self, vocab_size: int) -> bool:
        """Return whether top_k, top_p or min_p is on, so that the row may lose tokens."""
        return self.top_k < vocab_size or self.top_p < 1 or self.log_min_p > -math.inf

    def packed(self) -> bytes:
        """Return what a device reads of it: `COLUMNS` numbers of 8 bytes."""
        ways = self.way is Way.TOP_WORDS, self.way is Way.THRESHOLD
        return struct.pack("=qdddqqqq", *self[:6], *ways)

    def bounds(self, vocab_size: int) -> tuple[int, float]:
        """Return k and ln(min_p) where they bound how many logits a rank needs; else 0 and -inf.

        A filter keeps the first tokens of an order, and top_p a share of the mass that the others
        leave. So a row is bounded if all that it weighs lies among its first k tokens, k <= 256, or
        within min_p of its first one. If both bound the row, all lies within both.

                          top_k      min_p
            no top_p      bounds     bounds
            sequential    bounds     bounds
            joint         no         bounds     top_p is a share of tokens that top_k cuts, too
            min_p_last    bounds     no         top_p is a share of tokens that min_p cuts, too
        """
        whole = self.top_p >= 1
        by_top_k = self.top_k <= MAX_TOP_WORDS and self.top_k < vocab_size
        by_top_k &= whole or not self.joint
        by_min_p = whole or self.total_log_min_p > -math.inf
        return self.top_k if by_top_k else 0, self.log_min_p if by_min_p else -math.inf


COLUMNS = 8
"""Numbers per row in the tensor of `RowFilters`."""


@cache
def keeps_all(vocab_size: int) -> RowFilter:
    """Return the filter of an unfiltered row in a batch where others may have filters."""
    return RowFilter(vocab_size, 1.0, -math.inf, -math.inf, False, False, Way.REJECTION)


def _number(place: int) -> Any:
    return property(lambda filters: filters.columns[place, : len(filters.row_list)])


def _real(place: int) -> Any:
    return property(
        lambda filters: filters.columns[place, : len(filters.row_list)].view(torch.float64)
    )


def _bit(place: int) -> Any:
    return property(lambda filters: filters._bits[place, : len(filters.row_list)])


@dataclass(frozen=True)
class RowFilters:
    """The filters of the F rows of a batch that have any, on the device and on the host.

    All of a row's numbers lie in one tensor, so that rows are sent, and picked, in one operation.

    Attributes:
        row_index, row_list: int64 [F] and a list, the rows' indices in the batch.
        columns: int64 [8 or more, F or more], the bits of the numbers below; see
            `columns_of`.
        kinds: the filters that may occur, which say which searches a step needs.
        known: whether they are those of each row in order. If not, the host does not know the rows,
            and any of them may have any kind.
        top_k: int64 [F]; V where top_k is off.
        top_p: float64 [F]; 1 where top_p is off. Not fp32, because 0.1 of ten equal tokens is one.
        log_min_p: float64 [F], ln(min_p), -inf where it is off; a host's, as on any device.
        total_log_min_p: float64 [F], ln(min_p) if top_p is a share of what min_p leaves, else -inf.
        keep_ties, joint: bool [F].
        by_top_words: bool [F], whether a row goes by top words.
        by_threshold: bool [F], whether the threshold alone can decide a row.
    """

    row_index: Tensor
    row_list: list[int]
    columns: Tensor
    kinds: list[RowFilter]
    known: bool = True

    def __len__(self) -> int:
        return len(self.row_list)

    top_k, top_p, log_min_p, total_log_min_p = _number(0), _real(1), _real(2), _real(3)
    keep_ties, joint, by_top_words, by_threshold = _bit(0), _bit(1), _bit(2), _bit(3)

    @cached_property
    def _bits(self) -> Tensor:
        return self.columns[4:COLUMNS] != 0

    @cached_property
    def different(self) -> set[RowFilter]:
        """The kinds, each once."""
        return set(self.kinds)

    def select(self, index: list[int], places: Tensor | slice) -> RowFilters:
        """Return some of the filtered rows, without a copy if all are listed in order.

        Args:
            places: the same as `index_of` returns it.
        """
        if isinstance(places, slice):
            return self
        padded = F.pad(places, (0, -len(index) % ALIGNED))
        return RowFilters(
            self.row_index.index_select(0, places),
            [self.row_list[row] for row in index],
            self.columns.index_select(1, padded),
            [self.kinds[row] for row in index] if self.known else self.kinds,
            self.known,
        )

    @cached_property
    @ordinary_tensors
    def methods(self) -> list[tuple[bool, Tensor | slice, RowFilters]]:
        """The rows that begin with each method: whether by top words, their places among these
        rows, and their filters. They are made once, so that a step takes no index from the host."""
        found = []
        for few in (True, False):
            index = [i for i, its in enumerate(self.kinds) if (its.way is Way.TOP_WORDS) is few]
            if index:
                places = index_of(index, len(self.row_list), self.columns.device)
                found.append((few, places, self.select(index, places)))
        return found


@dataclass(frozen=True)
class LogprobRows:
    """The R rows of a batch that may ask for logprobs, with what each asks for.

    Attributes:
        row_list, row_index: a list and int64 [R], the rows' indices in the batch.
        top: the largest N that a row asks for.
        top_of: int64 [R], N of each row.
        chosen: int64 [R, C], the ids asked for, -1 where a row has fewer.
        processed_list, processed: a list and bool [R], whether a row's mode is a processed one.
        as_logits: bool [R], whether its mode is of logits.
        asks: bool [R], whether a row asks at all; None if every one does. If the host does not
            know the rows, every row is listed.
        places: int64 [R], the rows' places among the stored ones, or a slice if they are all of
            them, in order.
        filters: of the rows that have filters and a processed mode; None if there are none.
        filtered: int64, the places of the rows in `filters` among the R, or a slice for all.
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

    def among(self, stored: list[int], filters: RowFilters | None) -> LogprobRows:
        """Find the rows among the stored ones of a batch, and their filters among the batch's.

        It is done with the batch, so that a step takes no index from the host.
        """
        place = {row: i for i, row in enumerate(stored)}
        of_row = {row: i for i, row in enumerate(filters.row_list)} if filters else {}
        asking = enumerate(zip(self.row_list, self.processed_list, strict=True))
        filtered = [i for i, (row, processed) in asking if processed and row in of_row]
        own = [of_row[self.row_list[i]] for i in filtered]

        device = self.row_index.device
        found = replace(
            self, places=index_of([place[row] for row in self.row_list], len(stored), device)
        )
        if filters is None or not own:
            return found
        return replace(
            found,
            filters=filters.select(own, index_of(own, len(filters), device)),
            filtered=index_of(filtered, len(self.row_list), device),
        )


def lists_all(index: list[int], count: int) -> bool:
    """Return whether these are all of `count` rows in their own order, so that none has to move.

    All rows in another order are not: the threshold lists the rows as they come to it.
    """
    return index == list(range(count))


def index_of(index: list[int], count: int, device: torch.device) -> Tensor | slice:
    """Return these of `count` rows as an index on the device, a slice if they are all in order.

    A tensor that is indexed by a list would make its own index, by a copy that waits.
    """
    if lists_all(index, count):
        return slice(0, count)
    return tensors_of(index, device=device)[0]


def _way(top_k: int, top_p: float, keep_ties: bool, joint: bool, vocab_size: int) -> Way:
    # Without top_k there are no first k tokens, and a joint top_p is a share of all tokens.
    if top_k == vocab_size or (top_p < 1 and joint):
        return Way.REJECTION
    if top_k <= MAX_TOP_WORDS and not keep_ties:
        return Way.TOP_WORDS
    return Way.THRESHOLD if top_p < 1 else Way.REJECTION
