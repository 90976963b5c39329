"""Finds kept sets on vocabulary shards: the last token by radix search, exact and bounded.

Each filter keeps a prefix of the total order, which ends at one order word, its cut. The kept set
goes down to the largest of the cuts. `tpsample.filters.thresholds` finds those of most rules. That
of top_k is where the number of tokens reaches k, that of top_p where their mass reaches its limit.
These two are found digit by digit from the top: the ranks sum a histogram of the next digit's
weights, 64 integers per row, and the cut has the digit in which the running sum reaches the limit.
A word has 52 bits, so the search ends after nine rounds, whatever the logits. Larger digits take
fewer rounds and more bytes: 8 bits would be seven rounds of four times the size.

The histograms are those of radix select. The host never reads the device here, because the number
of rounds is fixed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import ABOVE_ALL, DIGIT_BITS, Search, below_top, mass_limit
from tpsample.core.rules import TOP_K
from tpsample.filters.thresholds import thresholds_of
from tpsample.output import KeptSets
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, Thresholds
from tpsample.request.row_filter import behind


def find_cut(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    thresholds: Thresholds | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Return int64 [F], where each kept set ends: a token is kept iff its order word is >= it.

    A row with a NaN, or with nothing but masked tokens, keeps nothing. A greedy row has no filters.
    Collective: the ranks search once if a row has top_k and once if a row has top_p, which the
    requests alone decide.

    Args:
        rows: the logits of the filtered rows on this rank, which know their largest ones.
        filters: their filters; the same on every rank.
        thresholds: of the rows; None to find them.
        total: int64 [F], the masses that top_p takes a share of, over all ranks; None to sum them.
    """
    assert rows.top is not None
    its = thresholds_of(rows, filters, ranks) if thresholds is None else thresholds
    cut, total_cut = its.least, its.least_of_total
    if filters.demand.counts:
        top_k_cut = _weighted_cut(rows, its.most, its, ranks, mass=False)
        cut = cut.maximum(top_k_cut)
        before_top_p = top_k_cut.masked_fill(filters.column(behind(TOP_K.name)), 0)
        total_cut = total_cut.maximum(before_top_p)
    if filters.demand.masses:
        if total is None:
            total = ranks.sum_integers(rows.mass_from(total_cut)[:, 0])
        top_p_cut = _weighted_cut(rows, mass_limit(total, its.share), its, ranks, mass=True)
        cut = torch.where(its.share < 1, cut.maximum(top_p_cut), cut)
    # A row that was made greedy by its temperature alone keeps what a mask leaves.
    cut = torch.where(rows.noise.random.squeeze(1), cut, word.LOWEST_DRAWABLE)
    return torch.where(rows.top > -torch.inf, cut, ABOVE_ALL)


def _weighted_cut(
    rows: ShardLogits,
    limit: Tensor,
    thresholds: Thresholds,
    ranks: Ranks,
    *,
    mass: bool,
) -> Tensor:
    """Return the word at which the weight of descending words of all ranks reaches `limit`.

    With ties="keep" it is the last word of the same logit.

    Args:
        limit: int64 [F] >= 1. A limit above the row's whole weight stands for the whole.
        mass: whether a token's weight is its mass, or one.
    """
    search = Search(torch.zeros_like(limit), torch.zeros_like(limit), limit)
    for shift in range(word.EPOCH_SHIFT // DIGIT_BITS * DIGIT_BITS, -1, -DIGIT_BITS):
        bins = ranks.sum_integers(rows.digits(search.prefix, shift, mass=mass))
        search = rows.next_digit(search, bins)
    cut = search.prefix
    return torch.where(thresholds.keep_ties > 0, cut & ~word.TOKEN_MASK, cut)


def find_kept_sets(
    rows: ShardLogits,
    filters: RowFilters,
    cap: int,
    ranks: Ranks,
    *,
    drawn: Tensor | None = None,
    may_read: bool = True,
) -> KeptSets:
    """Return the tokens of every row that could have been drawn, for training.

    Collective. A kept set is a prefix of the total order, so each rank's part of it is the first
    words of its own order. Beside the search for the cut, a row costs every rank 8 (W - 1) bytes
    for the sizes and 8 (W - 1) · n bytes for the words, where n is the most words that one rank has
    of a row that is listed. A row over the cap sends no words, because it is reported as an
    overflow and never cut short. Nor does a row that kept all ids.

    Args:
        rows: the logits of all rows of the step on this rank.
        cap: most tokens that are reported of a row.
        drawn: bool [R], the rows that drew a token; None for all.
        may_read: whether the host may read from the device how many words there are. If not, n is
            min(cap, V), and the sets lie in memory for as many ids of every row.
    """
    top_word = ranks.gather_integers(rows.first_words(1)).amax(dim=0).squeeze(1)
    top = word.value_of(top_word)
    rows = replace(rows, top=top)
    cut = find_cut(rows, filters, ranks)
    # The cut of a row without a token lies above every word, so it stays.
    cut = torch.where(rows.noise.random.squeeze(1), cut, cut.maximum(top_word))
    mass = ranks.sum_integers(rows.mass_from(cut)[:, 0])

    counts = ranks.gather_integers(rows.count_from(cut.unsqueeze(1))).squeeze(2)  # [W, R]
    if drawn is not None:
        counts = counts * drawn
    sizes = counts.sum(dim=0)
    whole = sizes == rows.vocab_size
    listed = (sizes <= cap) & ~whole
    listed_sizes = sizes * listed
    width = longest = min(cap, rows.vocab_size)
    total = len(sizes) * longest
    if may_read and total:
        needed = (counts * listed).max(), listed_sizes.max(), listed_sizes.sum()
        width, longest, total = torch.stack(needed).tolist()
    words = rows.words_from(cut.where(listed_sizes > 0, ABOVE_ALL), width)
    gathered = ranks.gather_integers(words)
    first = gathered.transpose(0, 1).flatten(1)
    if len(gathered) > 1:
        first = first.topk(longest, dim=1).values

    below = below_top(word.value_of(first), top.unsqueeze(1), rows.temperature.unsqueeze(1))
    log_masses = below - (mass.double() / TOP_MASS).log().unsqueeze(1)
    offsets = F.pad(listed_sizes.cumsum(dim=0), (1, 0))
    place = offsets[:-1, None] + torch.arange(longest, device=first.device)
    place = place.where(first > 0, total).flatten()  # behind the last set, where there is no word
    ids = first.new_full((total + 1,), word.NO_TOKEN)
    masses = log_masses.new_full((total + 1,), torch.nan)
    return KeptSets(
        offsets=offsets,
        token_ids=ids.scatter_(0, place, word.token_of(first).flatten())[:-1],
        log_masses=masses.scatter_(0, place, log_masses.flatten())[:-1],
        sizes=sizes,
        whole=whole,
        overflow=~(listed | whole),
    )
