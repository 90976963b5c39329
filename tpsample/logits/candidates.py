"""The tokens of some rows that no mask forbids, to be weighed again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DIGIT_BITS = 6
DIGITS = 1 << DIGIT_BITS


@dataclass(frozen=True)
class Search:
    """Where the weight, summed over descending words and all ranks, reaches a limit.

    Attributes:
        prefix: int64 [F], the digits of that word found so far.
        reached: int64 [F], the weight of the words before those of the prefix.
        limit: int64 [F] >= 1; above the row's whole weight it stands for the whole.
    """

    prefix: Tensor
    reached: Tensor
    limit: Tensor


class Candidates(Protocol):
    """What `threshold` asks of them."""

    def digits(self, prefix: Tensor, shift: int, *, mass: bool) -> Tensor:
        """Histogram [F, 2^DIGIT_BITS] of a digit of the words that begin with a prefix.

        Digits are complemented: bin 0 holds the largest words.

        Args:
            prefix: int64 [F], the digits before.
            shift: of the digit, in bits.
            mass: whether bins are sums of masses, int64, or numbers of tokens, int32.
        """

    def next_digit(self, search: Search, bins: Tensor) -> Search:
        """The search with one digit more: the one in which the running sum reaches the limit.

        Args:
            bins: what `digits` returns, summed over the ranks.
        """

    def mass_from(self, cut: Tensor) -> Tensor:
        """int64 [F], the mass of those whose order word is >= cut, int64 [F]."""


@dataclass(frozen=True)
class StoredCandidates:
    """`Candidates` by their order words and masses, int64 [F, V_local]; 0 for what is no
    candidate."""

    words: Tensor
    mass: Tensor

    def digits(self, prefix: Tensor, shift: int, *, mass: bool) -> Tensor:
        weight = self.mass if mass else (self.words > 0).to(torch.int32)
        digit = ~(self.words >> shift) & (DIGITS - 1)
        inside = (self.words >> (shift + DIGIT_BITS)) == prefix.unsqueeze(1)
        bins = weight.new_zeros(len(prefix), DIGITS)
        return bins.scatter_add_(1, digit, weight * inside)

    def next_digit(self, search: Search, bins: Tensor) -> Search:
        bins = bins.to(torch.int64)
        upto = search.reached.unsqueeze(1) + bins.cumsum(dim=1)
        limit = search.limit.minimum(upto[:, -1])
        found = (upto < limit.unsqueeze(1)).sum(dim=1, keepdim=True)
        return Search(
            prefix=(search.prefix << DIGIT_BITS) | (DIGITS - 1 - found.squeeze(1)),
            reached=(upto - bins).gather(1, found).squeeze(1),
            limit=limit,
        )

    def mass_from(self, cut: Tensor) -> Tensor:
        return (self.mass * (self.words >= cut.unsqueeze(1))).sum(dim=1)
