"""The tokens of some rows that no mask forbids, weighed again and again for a radix search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tpsample.core.order import DIGIT_BITS, DIGITS, masses, order_words
from tpsample.logits.stored_logits import StoredLogits


@dataclass(frozen=True)
class Search:
    """A search for the word at which the weight of descending words of all ranks reaches a limit.

    Attributes:
        prefix: int64 [F], the digits of that word found so far.
        reached: int64 [F], the weight of the words before those of the prefix.
        limit: int64 [F] >= 1; above the row's whole weight it stands for the whole.
    """

    prefix: Tensor
    reached: Tensor
    limit: Tensor


@dataclass(frozen=True)
class Candidates:
    """The unmasked tokens of some rows on this rank.

    Attributes:
        rows: the rows.
        top: fp32 [F], their largest logits over all ranks.
    """

    rows: StoredLogits
    top: Tensor

    @cached_property
    def _words_and_mass(self) -> tuple[Tensor, Tensor]:
        """Order words and masses, int64 [F, V_local] each; 0 where a token is masked."""
        words = torch.empty_like(self.rows.logits, dtype=torch.int64)
        mass = torch.empty_like(words)
        for first_id, logits in self.rows.tiles():
            start = first_id - self.rows.first_id
            tile = slice(start, start + logits.shape[1])
            unmasked = logits > -torch.inf
            words[:, tile] = order_words(logits, first_id) * unmasked
            mass[:, tile] = masses(self.rows.below(logits, self.top)) * unmasked
        return words, mass

    def digits(self, prefix: Tensor, shift: int, *, mass: bool) -> Tensor:
        """Return the histogram [F, 2^DIGIT_BITS] of a digit of the words that begin with a prefix.

        Digits are complemented: bin 0 holds the largest words.

        Args:
            prefix: int64 [F], the digits before.
            shift: of the digit, in bits.
            mass: whether bins are sums of masses, int64, or numbers of tokens, int32.
        """
        words, masses_ = self._words_and_mass
        weight = masses_ if mass else (words > 0).to(torch.int32)
        digit = ~(words >> shift) & (DIGITS - 1)
        inside = (words >> (shift + DIGIT_BITS)) == prefix.unsqueeze(1)
        bins = weight.new_zeros(len(prefix), DIGITS)
        return self.rows.of_undone(bins.scatter_add_(1, digit, weight * inside))

    def next_digit(self, search: Search, bins: Tensor) -> Search:
        """Return the search with one digit more, in which the running sum reaches the limit.

        Args:
            bins: what `digits` returns, summed over the ranks.
        """
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
        """Return int64 [F], the mass of the tokens whose order word is >= cut, int64 [F]."""
        words, mass = self._words_and_mass
        return (mass * (words >= cut.unsqueeze(1))).sum(dim=1)
