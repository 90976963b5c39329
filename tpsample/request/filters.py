"""The filters of a batch's rows as tensors, and the way each row takes to its token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsample.core.host_tensors import integers, reals
from tpsample.request.params import SamplingParams

MAX_TOP_WORDS = 256
"""Largest top_k whose tokens are worth exchanging."""


class Way(Enum):
    """How a filtered row finds its token on shards; see `tpsample.logits.filters`."""

    REJECTION = "rejection"
    REJECTION_IN_TOP_K = "rejection in top_k"
    TOP_WORDS = "top words"
    THRESHOLD = "threshold"


class RowFilter(NamedTuple):
    """The filters of one row, as `RowFilters` has them; top_k is 0 if it has none."""

    top_k: int
    top_p: float
    log_min_p: float
    total_log_min_p: float
    keep_ties: bool
    joint: bool
    first_way: Way
    second_way: Way

    @staticmethod
    def of(request: SamplingParams, vocab_size: int) -> RowFilter:
        """Return the filters of a request, worked out once."""
        found = NO_FILTER
        if is_filtered(request, vocab_size):
            top_k = limit_k(request.top_k, vocab_size)
            log_min_p = math.log(request.min_p) if request.min_p > 0 else -math.inf
            last = request.filter_order == "min_p_last"
            found = RowFilter(
                top_k,
                request.top_p,
                log_min_p,
                -math.inf if last else log_min_p,
                request.ties == "keep",
                request.filter_order == "joint",
                *_ways(request, top_k, vocab_size),
            )
        request.memo[vocab_size] = found
        return found


NO_FILTER = RowFilter(0, 1.0, -math.inf, -math.inf, False, False, Way.REJECTION, Way.REJECTION)


@dataclass(frozen=True)
class RowFilters:
    """The filters of the F rows of a batch that have any: tensors, and lists for the host's plan.

    Attributes:
        row_index, row_list: int64 [F] and a list, the rows' indices in the batch.
        top_k, top_k_list: int64 [F] and a list; V where top_k is off.
        top_p, top_p_list: float64 [F] and a list; 1 where top_p is off. They are not fp32, because
            0.1 of ten equal tokens must be one token.
        log_min_p: float64 [F], ln(min_p), -inf where min_p is off. The host takes the logarithm, so
            that it does not depend on the device.
        total_log_min_p: float64 [F]; what min_p takes off the total of which top_p is a share,
            hence -inf also where min_p comes last.
        keep_ties, joint: bool [F].
        first_way, second_way: the way a row takes, and the one after a rejection that does not
            decide it.
        by_top_words, in_top_k: bool [F]; whether the second way is top words, and whether the first
            rejects in top_k.
    """

    row_index: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    total_log_min_p: Tensor
    keep_ties: Tensor
    joint: Tensor
    row_list: list[int]
    top_k_list: list[int]
    top_p_list: list[float]
    first_way: list[Way]
    second_way: list[Way]
    by_top_words: Tensor
    in_top_k: Tensor

    @staticmethod
    def of(
        requests: Sequence[SamplingParams], vocab_size: int, device: torch.device | str | None
    ) -> RowFilters | None:
        """Return the filters of a batch, None if no row has any.

        Greedy rows have none, because the argmax is always kept.
        """
        # Batches change between steps, and most rows stay: theirs is found, not worked out.
        found = [r.memo.get(vocab_size) or RowFilter.of(r, vocab_size) for r in requests]
        rows = [row for row, its in enumerate(found) if its.top_k]
        if not rows:
            return None
        columns = zip(*(found[row] for row in rows), strict=True)
        top_k, top_p, log_min_p, total_log_min_p, keep_ties, joint, first, second = columns
        ids, limits = integers(rows, top_k, device=device)
        by_top_words = [way is Way.TOP_WORDS for way in second]
        in_top_k = [way is Way.REJECTION_IN_TOP_K for way in first]
        bits = integers(keep_ties, joint, by_top_words, in_top_k, device=device, dtype=torch.bool)
        numbers = reals(top_p, log_min_p, total_log_min_p, device=device)
        return RowFilters(
            row_index=ids,
            top_k=limits,
            top_p=numbers[0],
            log_min_p=numbers[1],
            total_log_min_p=numbers[2],
            keep_ties=bits[0],
            joint=bits[1],
            row_list=rows,
            top_k_list=list(top_k),
            top_p_list=list(top_p),
            first_way=list(first),
            second_way=list(second),
            by_top_words=bits[2],
            in_top_k=bits[3],
        )

    def __len__(self) -> int:
        return len(self.row_list)

    def select(self, index: list[int]) -> RowFilters:
        """Return some of the filtered rows, without a copy if all are listed in order."""
        if lists_all(index, len(self)):
            return self
        some: dict[str, Any] = {}
        for name, values in vars(self).items():
            some[name] = (
                values[index] if isinstance(values, Tensor) else [values[row] for row in index]
            )
        return RowFilters(**some)

    def beyond_top_words(self, vocab_size: int) -> RowFilters:
        """Return the filters with lists in which rows by top words ask for nothing.

        The lists say which searches a step needs at all; the tensors stay as they are.
        """
        few = [way is Way.TOP_WORDS for way in self.second_way]
        return replace(
            self,
            top_k_list=[
                vocab_size if its else k for k, its in zip(self.top_k_list, few, strict=True)
            ],
            top_p_list=[1.0 if its else p for p, its in zip(self.top_p_list, few, strict=True)],
        )

    def by_way(self, ways: list[Way]) -> dict[Way, list[int]]:
        """Return the filtered rows of each way."""
        return {way: [row for row, its in enumerate(ways) if its is way] for way in Way}


def lists_all(index: list[int], count: int) -> bool:
    """Return whether these are all of `count` rows in their own order, so that none has to move.

    All rows in another order are not: a second round lists the rows as they come to it.
    """
    return index == list(range(count))


def _ways(request: SamplingParams, top_k: int, vocab_size: int) -> tuple[Way, Way]:
    few = top_k <= MAX_TOP_WORDS and top_k < vocab_size and request.ties == "exact"
    if top_k < vocab_size and request.top_p < 1 and request.filter_order != "joint":
        ways = (Way.TOP_WORDS, Way.TOP_WORDS), (Way.REJECTION_IN_TOP_K, Way.THRESHOLD)
        return ways[0] if few else ways[1]
    return Way.REJECTION, Way.TOP_WORDS if few and request.top_p == 1 else Way.THRESHOLD


def limit_k(top_k: int, vocab_size: int) -> int:
    """Return top_k as a number of tokens: 0, -1 and everything from V on keep V."""
    return vocab_size if top_k < 1 else min(top_k, vocab_size)


def is_filtered(request: SamplingParams, vocab_size: int) -> bool:
    """Return whether a filter can take a token away from this request."""
    top_k = limit_k(request.top_k, vocab_size)
    return not request.greedy and (top_k < vocab_size or request.top_p < 1 or request.min_p > 0)
