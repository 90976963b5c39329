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

import torch
from torch import Tensor

from tpsample import word
from tpsample.exchange.integers import IntegerExchange
from tpsample.stored.candidates import DIGIT_BITS, Candidates, Search
from tpsample.stored.kept_set import RowFilters, mass_limit
from tpsample.stored.rows import StoredRows


def find_cut(
    rows: StoredRows, filters: RowFilters, top: Tensor, integers: IntegerExchange
) -> Tensor:
    """int64 [F], the last word of each kept set: a token is kept iff its order word is >= it.

    min_p, then top_k, then top_p. Collective: two searches, or one if no row has top_p, or if
    all have it and none top_k; the requests alone decide that.

    Args:
        rows: the logits of the filtered rows on this rank.
        filters: their filters; the same on every rank.
        top: fp32 [F], largest logits over all ranks, neither NaN nor -inf.
    """
    candidates = rows.candidates(top, filters.log_min_p)
    if min(filters.host_top_k) >= rows.vocab_size and max(filters.host_top_p) < 1:
        cut = torch.zeros_like(filters.top_k)
    else:
        cut = _cut_of_top_k(candidates, filters, integers)
    if min(filters.host_top_p) < 1:
        before_top_p = torch.where(filters.joint, 0, cut)
        limit = mass_limit(integers.sum(candidates.mass_from(before_top_p)), filters.top_p)
        mass_cut = _weighted_cut(candidates, limit, integers, mass=True)
        cut = torch.where(filters.top_p < 1, cut.maximum(mass_cut), cut)
    return cut


def find_top_k_cut(
    rows: StoredRows, filters: RowFilters, top: Tensor, integers: IntegerExchange
) -> Tensor:
    """int64 [F], the last word that min_p, then top_k leave; half the way of `find_cut`, and the
    cheaper one, since a histogram of numbers of tokens takes 32 bits a bin. Collective."""
    return _cut_of_top_k(rows.candidates(top, filters.log_min_p), filters, integers)


def _cut_of_top_k(candidates: Candidates, filters: RowFilters, integers: IntegerExchange) -> Tensor:
    cut = _weighted_cut(candidates, filters.top_k, integers, mass=False)
    # ties="keep": from the k-th token on to the last id of its logit.
    return torch.where(filters.keep_ties, cut & ~word.TOKEN_MASK, cut)


def _weighted_cut(
    candidates: Candidates, limit: Tensor, integers: IntegerExchange, *, mass: bool
) -> Tensor:
    """The word at which the weight, summed over descending words and all ranks, reaches `limit`.

    Args:
        limit: int64 [F] >= 1; above the row's whole weight it stands for the whole.
        mass: whether a token's weight is its mass, or one.
    """
    search = Search(torch.zeros_like(limit), torch.zeros_like(limit), limit)
    for shift in range(word.EPOCH_SHIFT // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        bins = integers.sum(candidates.digits(search.prefix, shift, mass=mass))
        search = candidates.next_digit(search, bins)
    return search.prefix
