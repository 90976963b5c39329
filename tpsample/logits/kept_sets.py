"""Finds kept sets on vocabulary shards: the last token by radix search, exact and bounded.

Each filter keeps a prefix of the total order, which ends at one order word, its cut. The kept set
goes down to the largest of the cuts. That of min_p follows from the largest logit. That of top_k is
where the number of tokens reaches k, that of top_p where their mass reaches its limit. These two
are found digit by digit from the top: the ranks sum a histogram of the next digit's weights, 64
integers per row, and the cut has the digit in which the running sum reaches the limit. A word has
52 bits, so the search ends after nine rounds, whatever the logits. Larger digits take fewer rounds
and more bytes: 8 bits would be seven rounds of four times the size.

The histograms are those of radix select. The host never reads the device here, because the number
of rounds is fixed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.masses import TOP_MASS
from tpsample.core.order import DIGIT_BITS, Search, below_top, mass_limit
from tpsample.logits.shard_logits import ShardLogits
from tpsample.output import KeptSets
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters


def find_cut(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, *, total: Tensor | None = None
) -> Tensor:
    """Return int64 [F], where each kept set ends: a token is kept iff its order word is >= it.

    A row with a NaN, or with nothing but masked tokens, keeps nothing. A greedy row has no filters.
    Collective: the ranks search once if a row has top_k and once if a row has top_p, which the
    requests alone decide.

    Args:
        rows: the logits of the filtered rows on this rank, which know their largest ones.
        filters: their filters; the same on every rank.
        total: int64 [F], the masses that top_p takes a share of, over all ranks; None to sum them.
    """
    min_p_cut = rows.min_p_cut(filters.log_min_p)
    top_k_cut = torch.zeros_like(min_p_cut)
    if min(kind.top_k for kind in filters.different) < rows.vocab_size:
        top_k_cut = _weighted_cut(rows, filters.top_k, filters, ranks, mass=False)
    cut = min_p_cut.maximum(top_k_cut)
    if min(kind.top_p for kind in filters.different) < 1:
        if total is None:
            total_cut = torch.where(filters.joint, 0, top_k_cut)
            min_p_first = filters.total_log_min_p > -torch.inf
            total_cut = torch.where(min_p_first, total_cut.maximum(min_p_cut), total_cut)
            total = ranks.sum_integers(rows.mass_from(total_cut)[:, 0])
        limit = mass_limit(total, filters.top_p)
        top_p_cut = _weighted_cut(rows, limit, filters, ranks, mass=True)
        cut = torch.where(filters.top_p < 1, cut.maximum(top_p_cut), cut)
    # A row that was made greedy by its temperature alone keeps what a mask leaves.
    unfiltered = torch.where(min_p_cut < 1 << word.EPOCH_SHIFT, word.LOWEST_DRAWABLE, min_p_cut)
    return torch.where(rows.noise.random.squeeze(1), cut, unfiltered)


def _weighted_cut(
    rows: ShardLogits,
    limit: Tensor,
    filters: RowFilters,
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
    return torch.where(filters.keep_ties, cut & ~word.TOKEN_MASK, cut)


def find_kept_sets(rows: ShardLogits, filters: RowFilters, cap: int, ranks: Ranks) -> KeptSets:
    """Return the tokens of every filtered row that could have been drawn, for training.

    Collective; waits for the GPU. A kept set is a prefix of the total order, so each rank's part
    of it is the first words of its own order. Beside the search for the cut, a row costs every
    rank 8 (W - 1) bytes for the sizes and 8 (W - 1) · n bytes for the words, where n is the most
    words that one rank has of a row that fits. A row over the cap sends no words, because it is
    reported as an overflow and never cut short.

    Args:
        rows: the logits of the filtered rows on this rank.
        cap: most tokens that are reported of a row.
    """
    top_word = ranks.gather_integers(rows.first_words(1)).amax(dim=0).squeeze(1)
    top = word.value_of(top_word)
    rows = replace(rows, top=top)
    cut = find_cut(rows, filters, ranks)
    mass = ranks.sum_integers(rows.mass_from(cut)[:, 0])
    cut = cut.unsqueeze(1)

    counts = ranks.gather_integers(rows.count_from(cut)).squeeze(2)  # [W, F]
    sizes = counts.sum(dim=0)
    fits = sizes <= cap
    # How wide the exchange has to be, the host reads; the same on every rank.
    width, longest = torch.stack([(counts * fits).max(), (sizes * fits).max()]).tolist()
    words = rows.first_words(width)
    gathered = ranks.gather_integers(words * (words >= cut) * fits.unsqueeze(1))
    first = gathered.transpose(0, 1).flatten(1).topk(longest, dim=1).values

    kept = first > 0
    below = below_top(word.value_of(first), top.unsqueeze(1), rows.temperature.unsqueeze(1))
    log_masses = below - (mass.double() / TOP_MASS).log().unsqueeze(1)
    offsets = torch.zeros(len(filters) + 1, dtype=torch.int64, device=sizes.device)
    offsets[1:] = (sizes * fits).cumsum(dim=0)
    return KeptSets(
        rows=filters.row_index,
        offsets=offsets,
        token_ids=word.token_of(first[kept]),
        log_masses=log_masses[kept],
        sizes=sizes,
        overflow=~fits,
    )
