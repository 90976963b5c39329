"""The filters of a batch's rows as tensors, and the way each row takes to its token."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.host_tensors import ALIGNED, columns_of, integers
from tpsample.request.params import SamplingParams

MAX_TOP_WORDS = 256
"""Largest top_k whose tokens are worth exchanging."""


class Way(Enum):
    """How a filtered row finds its token on shards; see `tpsample.logits.filters`."""

    TOP_WORDS = "top words"
    REJECTION = "rejection"
    THRESHOLD = "threshold"


class RowFilter(NamedTuple):
    """The filters of one row, as `RowFilters` has them; top_k is 0 if it has none."""

    top_k: int
    top_p: float
    log_min_p: float
    total_log_min_p: float
    keep_ties: bool
    joint: bool
    way: Way = Way.REJECTION
    packed: bytes = b""
    """What a device reads of it: `COLUMNS` numbers of 8 bytes."""

    @staticmethod
    def of(request: SamplingParams, vocab_size: int) -> RowFilter:
        """Return the filters of a request, worked out once."""
        found: RowFilter | None = request.memo.get(vocab_size)
        if found is None:
            found = request.memo[vocab_size] = _filter_of(request, vocab_size)
        return found

    def with_packed(self) -> RowFilter:
        """Return the same with its bytes."""
        bits = (
            self.keep_ties,
            self.joint,
            self.way is Way.TOP_WORDS,
            self.way is Way.THRESHOLD,
        )
        return self._replace(packed=struct.pack("=qdddqqqq", *self[:4], *bits))


COLUMNS = 8
"""Numbers per row in the tensor of `RowFilters`."""

NO_FILTER = RowFilter(0, 1.0, -math.inf, -math.inf, False, False, packed=bytes(8 * COLUMNS))


def keeps_all(vocab_size: int) -> RowFilter:
    """Return filters that take no token away, for a row that has none among rows that may."""
    return NO_FILTER._replace(top_k=vocab_size).with_packed()


@dataclass(frozen=True)
class RowFilters:
    """The filters of the F rows of a batch that have any, on the device and on the host.

    All of a row's numbers lie in one tensor, so that rows are sent, and picked, in one operation.

    Attributes:
        row_index, row_list: int64 [F] and a list, the rows' indices in the batch.
        columns: int64 [8, F or more], the bits of what the properties return; see `columns_of`.
        kinds: the filters that may occur: of each row in order, or, where the host does not know
            the rows, those that any of them may have. They say which searches a step needs.
    """

    row_index: Tensor
    row_list: list[int]
    columns: Tensor
    kinds: list[RowFilter]

    @staticmethod
    def of(
        found: Sequence[RowFilter],
        filtered: bytes,
        device: torch.device | str | None,
        numbers: Tensor | None = None,
    ) -> RowFilters | None:
        """Return the filters of a batch, None if no row has any.

        Greedy rows have none, because the argmax is always kept.

        Args:
            found: of all rows.
            filtered: 1 or 0 for each, whether it has any.
            numbers: int64 [a multiple of 16 from B on, 8], of all rows on the device; None sends
                those of `found`.
        """
        if 1 not in filtered:
            return None
        if 0 not in filtered and numbers is not None:  # as in many servers; nothing has to be found
            index = torch.arange(len(found) + -len(found) % ALIGNED, device=numbers.device)
            columns = numbers[: len(index)].T.contiguous()
            return RowFilters(index[: len(found)], list(range(len(found))), columns, list(found))
        rows, kinds = list(compress(range(len(found)), filtered)), list(compress(found, filtered))
        if numbers is None:
            (row_index,) = integers(rows, device=device)
            packed = b"".join([kind.packed for kind in kinds])
            return RowFilters(row_index, rows, columns_of(packed, COLUMNS, device=device), kinds)
        (index,) = integers(rows + rows[:1] * (-len(rows) % ALIGNED), device=numbers.device)
        columns = numbers.index_select(0, index).T.contiguous()
        return RowFilters(index[: len(rows)], rows, columns, kinds)

    def __len__(self) -> int:
        return len(self.row_list)

    @property
    def top_k(self) -> Tensor:
        """int64 [F]; V where top_k is off."""
        return self.columns[0, : len(self)]

    @property
    def top_p(self) -> Tensor:
        """float64 [F]; 1 where top_p is off. Not fp32, because 0.1 of ten equal tokens is one."""
        return self.columns[1, : len(self)].view(torch.float64)

    @property
    def log_min_p(self) -> Tensor:
        """float64 [F], ln(min_p), -inf where it is off; a host's logarithm, as on any device."""
        return self.columns[2, : len(self)].view(torch.float64)

    @property
    def total_log_min_p(self) -> Tensor:
        """float64 [F]; what min_p takes off the total of which top_p is a share, hence -inf also
        where min_p comes last."""
        return self.columns[3, : len(self)].view(torch.float64)

    @cached_property
    def _bits(self) -> Tensor:
        return self.columns[4:] != 0

    @property
    def keep_ties(self) -> Tensor:
        """bool [F]."""
        return self._bits[0, : len(self)]

    @property
    def joint(self) -> Tensor:
        """bool [F]."""
        return self._bits[1, : len(self)]

    @property
    def by_top_words(self) -> Tensor:
        """bool [F], whether a row goes by top words."""
        return self._bits[2, : len(self)]

    @property
    def by_threshold(self) -> Tensor:
        """bool [F], whether the threshold alone can decide a row."""
        return self._bits[3, : len(self)]

    @cached_property
    def top_k_list(self) -> list[int]:
        """top_k of each kind."""
        return [kind.top_k for kind in self.kinds]

    @cached_property
    def top_p_list(self) -> list[float]:
        """top_p of each kind."""
        return [kind.top_p for kind in self.kinds]

    @cached_property
    def ways(self) -> list[Way]:
        """The way that each kind takes."""
        return [kind.way for kind in self.kinds]

    def select(self, index: list[int]) -> RowFilters:
        """Return some of the filtered rows, without a copy if all are listed in order."""
        if lists_all(index, len(self)):
            return self
        return RowFilters(
            self.row_index[index],
            [self.row_list[row] for row in index],
            self.columns[:, [*index, *[0] * (-len(index) % ALIGNED)]],
            [self.kinds[row] for row in index],
        )


def lists_all(index: list[int], count: int) -> bool:
    """Return whether these are all of `count` rows in their own order, so that none has to move.

    All rows in another order are not: the threshold lists the rows as they come to it.
    """
    return index == list(range(count))


def _filter_of(request: SamplingParams, vocab_size: int) -> RowFilter:
    if not is_filtered(request, vocab_size):
        return NO_FILTER
    top_k = limit_k(request.top_k, vocab_size)
    log_min_p = math.log(request.min_p) if request.min_p > 0 else -math.inf
    last = request.filter_order == "min_p_last"
    return RowFilter(
        top_k,
        request.top_p,
        log_min_p,
        -math.inf if last else log_min_p,
        request.ties == "keep",
        request.filter_order == "joint",
        _way(request, top_k, vocab_size),
    ).with_packed()


def _way(request: SamplingParams, top_k: int, vocab_size: int) -> Way:
    # Without top_k there are no first k tokens, and a joint top_p is a share of all tokens.
    if top_k == vocab_size or (request.top_p < 1 and request.filter_order == "joint"):
        return Way.REJECTION
    if top_k <= MAX_TOP_WORDS and request.ties == "exact":
        return Way.TOP_WORDS
    return Way.THRESHOLD if request.top_p < 1 else Way.REJECTION


def limit_k(top_k: int, vocab_size: int) -> int:
    """Return top_k as a number of tokens: 0, -1 and everything from V on keep V."""
    return vocab_size if top_k < 1 else min(top_k, vocab_size)


def is_filtered(request: SamplingParams, vocab_size: int) -> bool:
    """Return whether a filter can take a token away from this request."""
    top_k = limit_k(request.top_k, vocab_size)
    return not request.greedy and (top_k < vocab_size or request.top_p < 1 or request.min_p > 0)
