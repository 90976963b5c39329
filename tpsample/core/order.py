"""Which tokens of a row may be drawn: one total order, integer masses; min_p, top_k and top_p.

    order   logit descending, then token id ascending: descending `order_words`
    below   y_v = (x_v - max x) / T                 fp32 in, float64, each operation rounded once
    mass    q_v = rint(2^40 · 2^(y_v · log2 e))     int64, 0 … 2^40
    min_p   keep v iff y_v >= ln(min_p)
    top_k   keep the first k; ties="keep" also what equals the k-th logit
    top_p   keep v iff the mass before v < ceil(top_p · Z); ties="keep" also what equals the logit
            of the last of these, which is to count greater logits alone as before v

Each rule keeps a prefix of the order, so the kept set is their shortest, whichever comes first.
The order of the rules matters to the mass Z alone, of which top_p is a share (`filter_order`):

    sequential   min_p, then top_k, then top_p      Z is the mass of what both left
    joint        min_p, then top_k beside top_p     Z is the mass of what min_p left
    min_p_last   top_k, then top_p, then min_p      Z is the mass of what top_k left

A masked token (-inf) is never kept; a row with +inf logits has mass on these alone. Sums of masses
are sums of integers (at most 2^20 · 2^40), so the boundary depends on no order of summation: not on
ranks, shards or tiles. The exponential is spelled out in IEEE additions and multiplications, so a
mass does not depend on a device's math library either; it lies within one unit of the real number.

"sequential" is vLLM's order, "joint" FlashInfer's and by default SGLang's; min_p comes last in
transformers, llama.cpp, TensorRT-LLM and SGLang. FlashInfer keeps ties, of top_k and of top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.request.params import SamplingParams

TOP_MASS = 2**40
"""Mass of the most likely token."""

_LOG2_E = math.log2(math.e)
POWER_OF_2 = [math.log(2) ** n / math.factorial(n) for n in range(14)]
"""Taylor series of 2^f; on |f| <= 1/2 its remainder is below 2^-57."""


MAX_TOP_WORDS = 256
"""Largest top_k whose tokens are worth exchanging."""


class Way(Enum):
    """How a filtered row finds its token on shards; see `tpsample.logits.filters`."""

    REJECTION = "rejection"
    REJECTION_IN_TOP_K = "rejection in top_k"
    TOP_WORDS = "top words"
    THRESHOLD = "threshold"


@dataclass(frozen=True)
class RowFilters:
    """The filters of those rows of a batch that have any. Fixed when the batch is built.

    Attributes:
        rows: int64 [F], their indices in the batch.
        top_k: int64 [F]; V where off.
        top_p: float64 [F]; 1 is off. Not fp32: 0.1 of ten equal tokens must be one token.
        log_min_p: float64 [F], ln(min_p), -inf where off. The logarithm is taken on the host, so
            that no device's own enters.
        total_log_min_p: float64 [F], -inf also where min_p comes last: what min_p takes off the
            total Z of top_p.
        keep_ties, joint: bool [F].
        host_rows, host_top_k, host_top_p, first_way, second_way: what the host plans with, [F]
            each.
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    total_log_min_p: Tensor
    keep_ties: Tensor
    joint: Tensor
    host_rows: list[int]
    host_top_k: list[int]
    host_top_p: list[float]
    first_way: list[Way]
    second_way: list[Way]

    @staticmethod
    def of(
        requests: Sequence[SamplingParams], vocab_size: int, device: torch.device | str | None
    ) -> RowFilters | None:
        """The filters of a batch, None if no row has any. Greedy rows have none: the argmax is
        always kept."""
        rows = [row for row, request in enumerate(requests) if is_filtered(request, vocab_size)]
        if not rows:
            return None
        kept = [requests[row] for row in rows]
        top_k = [limit_k(request.top_k, vocab_size) for request in kept]
        log_min_p = [math.log(r.min_p) if r.min_p > 0 else -math.inf for r in kept]
        total_log_min_p = [
            -math.inf if r.filter_order == "min_p_last" else its
            for r, its in zip(kept, log_min_p, strict=True)
        ]
        ways = [_ways(r, k, vocab_size) for r, k in zip(kept, top_k, strict=True)]

        def tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return RowFilters(
            rows=tensor(rows, torch.int64),
            top_k=tensor(top_k, torch.int64),
            top_p=tensor([r.top_p for r in kept], torch.float64),
            log_min_p=tensor(log_min_p, torch.float64),
            total_log_min_p=tensor(total_log_min_p, torch.float64),
            keep_ties=tensor([r.ties == "keep" for r in kept], torch.bool),
            joint=tensor([r.filter_order == "joint" for r in kept], torch.bool),
            host_rows=rows,
            host_top_k=top_k,
            host_top_p=[r.top_p for r in kept],
            first_way=[first for first, _ in ways],
            second_way=[second for _, second in ways],
        )

    def __len__(self) -> int:
        return self.rows.shape[0]

    def select(self, index: list[int]) -> RowFilters:
        """Some of the filtered rows. Nothing is copied if all are listed in order."""
        if lists_all(index, len(self)):
            return self
        return RowFilters(
            rows=self.rows[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            log_min_p=self.log_min_p[index],
            total_log_min_p=self.total_log_min_p[index],
            keep_ties=self.keep_ties[index],
            joint=self.joint[index],
            host_rows=[self.host_rows[row] for row in index],
            host_top_k=[self.host_top_k[row] for row in index],
            host_top_p=[self.host_top_p[row] for row in index],
            first_way=[self.first_way[row] for row in index],
            second_way=[self.second_way[row] for row in index],
        )

    def by_way(self, ways: list[Way]) -> dict[Way, list[int]]:
        """The filtered rows of each way."""
        return {way: [row for row, its in enumerate(ways) if its is way] for way in Way}


def lists_all(index: list[int], count: int) -> bool:
    """Whether these are all of `count` rows in their own order, so that none has to move.

    All rows in another order are not: a second round lists the rows as they come to it.
    """
    return index == list(range(count))


def _ways(request: SamplingParams, top_k: int, vocab_size: int) -> tuple[Way, Way]:
    """The way a filtered row takes, and the one it takes if rejection does not decide it."""
    few = top_k <= MAX_TOP_WORDS and top_k < vocab_size and request.ties == "exact"
    renormalised = top_k < vocab_size and request.top_p < 1 and request.filter_order != "joint"
    if renormalised:
        if few:
            return Way.TOP_WORDS, Way.TOP_WORDS
        return Way.REJECTION_IN_TOP_K, Way.THRESHOLD
    return Way.REJECTION, Way.TOP_WORDS if few and request.top_p == 1 else Way.THRESHOLD


def limit_k(top_k: int, vocab_size: int) -> int:
    """top_k as a number of tokens: 0, -1 and everything from V on keep V."""
    return vocab_size if top_k < 1 else min(top_k, vocab_size)


def is_filtered(request: SamplingParams, vocab_size: int) -> bool:
    """Whether a filter can take a token away from this request."""
    top_k = limit_k(request.top_k, vocab_size)
    return not request.greedy and (top_k < vocab_size or request.top_p < 1 or request.min_p > 0)


def order_words(logits: Tensor, first_id: int = 0) -> Tensor:
    """int64 [..., n]: descending, they list the tokens in the total order; NaN comes first."""
    ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
    return word.pack(logits, ids)


def below_top(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """y = (logit - top) / T, float64 <= 0; 0 for the top itself even if it is infinite.

    Args:
        logits: fp32, any shape [F, …].
        top: fp32 largest logit of the row, over all ranks; broadcasts.
        temperature: fp32; broadcasts.
    """
    difference = (logits.double() - top.double()) / temperature.double()
    return torch.where(logits == top, 0.0, difference)


def masses(below: Tensor) -> Tensor:
    """q = rint(2^40 · e^y), int64, of y <= 0 in float64."""
    exponent = (below * _LOG2_E).clamp_(min=-64.0)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    power = torch.full_like(fraction, POWER_OF_2[-1])
    for coefficient in POWER_OF_2[-2::-1]:
        power.mul_(fraction).add_(coefficient)
    # 2^(40 + whole) from its exponent bits, so the scaling is exact.
    scale = whole.to(torch.int64).add_(1023 + 40).bitwise_left_shift_(52).view(torch.float64)
    return power.mul_(scale).round_().to(torch.int64)


def candidates(order_word: Tensor, below: Tensor, log_min_p: Tensor) -> Tensor:
    """bool: neither masked nor cut by min_p. These tokens are a prefix of the order."""
    return (word.key_of(order_word) > word.KEY_MINUS_INF) & (below >= log_min_p)


def min_p_cut(top: Tensor, temperature: Tensor, log_min_p: Tensor) -> Tensor:
    """int64 [F]: what neither a mask nor min_p cuts are the tokens whose order word is >= it.

    `below_top` never falls as the logit rises, so a byte at a time finds the last of all fp32 keys
    that is cut. In a row with a NaN, or with nothing but masked tokens, every key is.

    Args:
        top: fp32 [F], largest logits over all ranks.
        temperature: fp32 [F].
        log_min_p: float64 [F].
    """
    top, temperature, log_min_p = (x.unsqueeze(1) for x in (top, temperature, log_min_p))
    bytes_ = torch.arange(256, device=top.device)
    key = torch.zeros_like(top, dtype=torch.int64)
    for shift in (24, 16, 8, 0):
        keys = (key + (bytes_ << shift)).clamp(min=word.KEY_MINUS_INF).minimum(word.key(top))
        words = keys << word.TOKEN_BITS
        kept = candidates(words, below_top(word.value_of(words), top, temperature), log_min_p)
        key += ((~kept).sum(dim=1, keepdim=True) - 1) << shift
    return (key.squeeze(1) + 1) << word.TOKEN_BITS


def mass_limit(total: Tensor, top_p: Tensor) -> Tensor:
    """int64: top_p keeps the tokens before which there is less mass; 2^62 where top_p is off.

    ceil(top_p · total), the product taken in float64; at least 1, so the first token stays.
    """
    limit = (total.double() * top_p).ceil().to(torch.int64)
    return torch.where(top_p < 1, limit, 2**62)


def kept_rows(logits: Tensor, temperature: Tensor, filters: RowFilters) -> Tensor:
    """bool [F, V]: the kept set of each filtered row, from full logits, by sorting.

    Args:
        logits: fp32 [F, V] of the filtered rows.
        temperature: fp32 [F].
    """
    top_k, top_p, log_min_p, total_log_min_p, keep_ties, joint = (
        x.unsqueeze(1)
        for x in (
            filters.top_k, filters.top_p, filters.log_min_p, filters.total_log_min_p,
            filters.keep_ties, filters.joint,
        )
    )  # fmt: skip
    words, order = order_words(logits).sort(dim=1, descending=True)
    logits = logits.gather(1, order)
    below = below_top(logits, logits[:, :1], temperature.unsqueeze(1))

    rank = torch.arange(logits.shape[1], device=logits.device)
    kth = logits.gather(1, (top_k - 1))
    in_top_k = (rank < top_k) | (keep_ties & (logits == kth))
    in_total = candidates(words, below, total_log_min_p) & (in_top_k | joint)
    mass = masses(below)
    total = (mass * in_total).sum(dim=1, keepdim=True)
    before = mass.cumsum(dim=1) - mass
    # ties="keep": before a token come greater logits alone, as before the first of its equals.
    before[:, 1:].masked_fill_(keep_ties & (logits[:, 1:] == logits[:, :-1]), 0)
    before = before.cummax(dim=1).values
    kept = candidates(words, below, log_min_p) & in_top_k & (before < mass_limit(total, top_p))
    kept &= ~logits[:, :1].isnan()
    return torch.zeros_like(kept).scatter_(1, order, kept)
