"""The last token of a kept set, found on vocabulary shards by radix search: exact and bounded.

A kept set is a prefix of the total order, so one order word, the cut, describes it. The cut of
top_k is where the number of tokens reaches k, the cut of top_p where their mass reaches its limit.
Each is found digit by digit from the top: ranks sum a histogram of the next digit's weights, 64
integers per row, and the digit in which the running sum reaches the limit is the cut's. A word has
52 bits, so nine rounds end it, whatever the logits. Larger digits take fewer rounds and more bytes:
8 bits would be seven rounds of four times the size.

The histograms are those of radix select; the rounds are fixed, so nothing here reads the device
from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample import word
from tpsample.exchange.integers import IntegerExchange
from tpsample.stored.kept_set import RowFilters, mass_limit
from tpsample.stored.rows import StoredRows

DIGIT_BITS = 6
DIGITS = 1 << DIGIT_BITS


@dataclass(frozen=True)
class Cut:
    """The kept set of each row.

    Attributes:
        word: int64 [F]; a token is kept iff its order word is >= this one.
        mass: int64 [F], the kept tokens' mass over all ranks.
    """

    word: Tensor
    mass: Tensor


def find_cut(rows: StoredRows, filters: RowFilters, top: Tensor, integers: IntegerExchange) -> Cut:
    """min_p, then top_k, then top_p. Collective.

    Args:
        rows: the logits of the filtered rows on this rank.
        filters: their filters; the same on every rank.
        top: fp32 [F], largest logits over all ranks, neither NaN nor -inf.
    """
    words, mass = rows.candidate_masses(top, filters.log_min_p)
    cut = _cut_of_top_k(words, filters, integers)
    of_top_k = mass * (words >= cut.unsqueeze(1))
    total = integers.sum(torch.where(filters.joint.unsqueeze(1), mass, of_top_k).sum(dim=1))
    limit = mass_limit(total, filters.top_p)
    mass_cut = _weighted_cut(words, mass, limit, integers)
    cut = torch.where(filters.top_p < 1, cut.maximum(mass_cut), cut)

    kept = mass * (words >= cut.unsqueeze(1))
    return Cut(cut, integers.sum(kept.sum(dim=1)))


def find_top_k_cut(
    rows: StoredRows, filters: RowFilters, top: Tensor, integers: IntegerExchange
) -> Tensor:
    """int64 [F], the last word that min_p, then top_k leave; half the way of `find_cut`, and the
    cheaper one, since a histogram of numbers of tokens takes 32 bits a bin. Collective."""
    words, _ = rows.candidate_masses(top, filters.log_min_p)
    return _cut_of_top_k(words, filters, integers)


def _cut_of_top_k(words: Tensor, filters: RowFilters, integers: IntegerExchange) -> Tensor:
    one = (words > 0).to(torch.int32)
    cut = _weighted_cut(words, one, filters.top_k, integers)
    # ties="keep": from the k-th token on to the last id of its logit.
    return torch.where(filters.keep_ties, cut & ~word.TOKEN_MASK, cut)


def _weighted_cut(
    words: Tensor, weight: Tensor, limit: Tensor, integers: IntegerExchange
) -> Tensor:
    """The word at which the weight, summed over descending words and all ranks, reaches `limit`.

    Args:
        words: int64 [F, V_local], distinct over all ranks where weight > 0.
        weight: int64 [F, V_local] >= 0, or int32 if the row's whole weight is one.
        limit: int64 [F] >= 1; above the row's whole weight it stands for the whole.
    """
    prefix = torch.zeros_like(limit)
    reached = torch.zeros_like(limit)
    for shift in range(word.EPOCH_SHIFT // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        # Digits are complemented: bin 0 holds the largest words.
        digit = ~(words >> shift) & (DIGITS - 1)
        inside = (words >> (shift + DIGIT_BITS)) == prefix.unsqueeze(1)
        bins = weight.new_zeros(limit.shape[0], DIGITS).scatter_add_(1, digit, weight * inside)
        bins = integers.sum(bins).to(torch.int64)
        upto = reached.unsqueeze(1) + bins.cumsum(dim=1)
        limit = limit.minimum(upto[:, -1])
        found = (upto < limit.unsqueeze(1)).sum(dim=1, keepdim=True)
        reached = (upto - bins).gather(1, found).squeeze(1)
        prefix = (prefix << DIGIT_BITS) | (DIGITS - 1 - found.squeeze(1))
    return prefix
