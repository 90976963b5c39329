"""Finds kept sets on vocabulary shards: the last token by a histogram and a list, or by digits.

Each filter keeps a prefix of the total order, which ends at one order word, its cut. The kept set
goes down to the largest of the cuts. `tpsample.filters.thresholds` finds those of most rules. That
of top_k is where the number of tokens reaches k, that of top_p where their mass reaches its limit.
These two are searched for, unless the first words over all ranks hold every set.

Where the host may read the device, one exchange sums a histogram over 512 even steps of y: 4 KB per
row. The masses of the steps bound how many tokens a top_p keeps. If these are few in all rows, one
exchange gathers them, and every rank has the sets. Otherwise it gathers the words of the step in
which the limit is reached, at most 4 KB per row. On a CPU the histogram first bounds how many words
these are. A row with too many words in that step goes on by digits, as every row does in fixed
rounds. The ranks then sum a histogram of the next digit's weights, 256 integers per row. The cut
has the digit in which the running sum reaches the limit. A logit has 32 bits, so the search ends
after four rounds. This is a radix select. The histograms of the last digit are gathered, not
summed. So each rank knows how many of its own tokens with the last logit are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.backends import cuts_of
from tpsample.backends.torch_.cuts import Cuts, LastDigits, OtherEnds
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.order import BINS, DIGIT_BITS, Search
from tpsample.core.rules import TOP_K
from tpsample.core.tensors import readable
from tpsample.filters.thresholds import thresholds_of, thresholds_of_first
from tpsample.output import KeptSets
from tpsample.ranks.ranks import MAX_PAYLOAD, Ranks
from tpsample.request.filters import RowFilters, Thresholds, index_of
from tpsample.request.plan import BatchView
from tpsample.request.row_filter import MAX_WEIGHED_WORDS, behind

LISTED = 512
"""How many words of a row's bin one rank lists. Several ranks together list up to twice as many,
because their parts are uneven. In 76 rows of real logits the bin in which a top_p up to 0.99 ends
was short. It had at most 350 words at T = 1, and up to 795 at T = 1.5."""
MOST_LISTED = 1 / 16
"""Largest part of the vocabulary that is listed, if the host knows a bound of the words of a bin.
The fullest bin of standard normal logits has 1 / 40 of them at T = 1."""


class Cut(NamedTuple):
    """Where the kept sets of F rows end, and what the ranks know of the sets by then.

    Attributes:
        rows: the logits of the rows, with the largest logits of all ranks.
        words: int64 [F]; a token is kept iff its order word is >= the row's.
        first: int64 [F, k], the first words over all ranks, where these hold every set; else None.
        held: int64 [W, F, 2], mass and number of the kept tokens of each rank, or [1, F, 2] of all;
            None where no message has brought them yet.
        drawn: int64 [F, num_samples], the order words of the drawn tokens, if these are known.
        one_of_greedy: whether a greedy row keeps one token, or else all that a mask leaves.
        none_greedy: whether it is known that no row is greedy.
        best: `Cuts.best_of_last_digit`, if the last pass of the search finds the best scores, too.
            `words` then says where this rank's part of each set ends.
    """

    rows: ShardLogits
    words: Tensor
    first: Tensor | None = None
    held: Tensor | None = None
    one_of_greedy: bool = True
    drawn: Tensor | None = None
    none_greedy: bool = False
    best: Tensor | None = None

    @property
    def words_of_logprobs(self) -> Tensor:
        """Where logprobs end, int64 [F]. A greedy row keeps one token, but reports all tokens."""
        if not self.one_of_greedy:
            return self.words
        return self.words.where(self.rows.noise.random.squeeze(1), word.LOWEST_DRAWABLE)


class Masses(NamedTuple):
    """The masses of F rows over all ranks.

    Attributes:
        total: int64 [F], the masses that top_p takes a share of.
        bins: int64 [F, BINS], the mass of each bin.
    """

    total: Tensor
    bins: Tensor


def find_cut(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    may_read: bool,
    thresholds: Thresholds | None = None,
    masses: Masses | None = None,
    of_greedy: Tensor | None = None,
    draws: bool = False,
) -> Cut:
    """Return where the kept set of each row ends.

    A row with a NaN, or with nothing but masked tokens, keeps nothing. A greedy row has no filters.
    Collective: the ranks search once if a row has top_k and once if a row has top_p, so the
    requests alone decide the exchanges.

    Args:
        rows: the logits of the filtered rows on this rank, with the largest logits of all ranks.
        filters: the filters of the rows; the same on every rank.
        may_read: whether the host may read from the device which rows a short search leaves open.
        thresholds: the thresholds of the rows; None to find them.
        masses: the masses of rows without top_k; None to sum them.
        of_greedy: int64 [F], where the sets of greedy rows end; None keeps all that a mask leaves.
        draws: whether the caller wants `Cut.best`.
    """
    one = of_greedy is not None
    if filters.by_first_words == {True}:
        gathered = ranks.gather_integers(rows.first_words(filters.demand.first))
        _, of_first = cut_of_first(rows, filters, ranks, gathered)
        ends = of_first.rows.last_cut(of_first.words, of_greedy=of_greedy)
        return of_first._replace(words=ends, drawn=None, one_of_greedy=one)  # nothing is drawn here
    assert rows.top is not None
    row_thresholds = thresholds_of(rows, filters, ranks) if thresholds is None else thresholds
    if not may_read:
        cut, best = _by_rounds(rows, filters, row_thresholds, ranks, of_greedy, draws=draws)
        return Cut(rows, cut, one_of_greedy=one, best=best)
    least, total_cut = row_thresholds.least, row_thresholds.least_of_total
    if filters.demand.counts:
        bins = ranks.sum_integers(cuts_of(rows).sums_of_bins(None))
        last = (None, None) if filters.demand.masses else (least, of_greedy)
        cut = _in_a_bin(
            rows, bins, row_thresholds.most, row_thresholds.keep_ties, ranks, *last, mass=False
        )
        if not filters.demand.masses:
            return Cut(rows, cut, one_of_greedy=one)
        before_top_p = cut.masked_fill(filters.column(behind(TOP_K.name)), 0)
        least, total_cut = least.maximum(cut), total_cut.maximum(before_top_p)
    if not filters.demand.masses:
        return Cut(rows, rows.last_cut(least, of_greedy=of_greedy), one_of_greedy=one)
    if masses is None:
        masses = _masses_of(rows, ranks, total_cut)
    total, bins = masses
    last = least, of_greedy
    cut = _in_a_bin(
        rows,
        bins,
        total,
        row_thresholds.keep_ties,
        ranks,
        *last,
        share=row_thresholds.share,
        mass=True,
    )
    return Cut(rows, cut, one_of_greedy=one)


def cut_of_first(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, gathered: Tensor
) -> tuple[Tensor, Cut]:
    """Return the tokens of rows that first words decide, as score words [F, num_samples], and where
    their kept sets end. Collective as `thresholds_of_first` is.

    Args:
        gathered: int64 [W, F, k], the first words of each rank.
    """
    first = rows.first_of(gathered, gathered.shape[2])
    (thresholds,) = thresholds_of_first(rows, first, filters, ranks)
    return _of_first(rows, first, thresholds)


def search(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    may_read: bool,
    number: int = 1,
    thresholds: Thresholds | None = None,
    of_greedy: Tensor | None = None,
) -> tuple[Tensor, Cut]:
    """Return the tokens of the rows as score words, [F, num_samples], and where their kept sets
    end. With `of_greedy` the cut has `Cut.held`. Collective, as `find_cut`, which documents the
    other arguments.

    Args:
        number: the least number of words of each row in a list.
    """
    masses = None
    if may_read and _may_list(filters):
        thresholds = thresholds or thresholds_of(rows, filters, ranks)
        masses = _masses_of(rows, ranks, thresholds.least_of_total)
        if listed := _cut_of_list(rows, thresholds, masses, ranks, number):
            return listed
    cut = find_cut(
        rows,
        filters,
        ranks,
        may_read=may_read,
        thresholds=thresholds,
        masses=masses,
        of_greedy=of_greedy,
        draws=True,
    )
    return best_of_cut(cut, ranks, weighs=of_greedy is not None)


def best_of_cut(cut: Cut, ranks: Ranks, *, weighs: bool) -> tuple[Tensor, Cut]:
    """Return the best score words over all ranks down to a cut, int64 [F, num_samples], and the
    cut. With `weighs` the cut has `Cut.held`. Collective."""
    rows, own = cut.rows, cut.best
    if own is None:
        own = rows.best_and_mass(cut.words) if weighs else rows.best_kept(cut.words)
    gathered = ranks.gather_integers(own)
    columns = [rows.noise.num_samples, 2 * weighs, int(cut.best is not None)]
    words, held, ends = gathered.split(columns, dim=2)
    if weighs:
        cut = cut._replace(held=held)
    if cut.best is not None:
        cut = cut._replace(words=largest_of(ends).flatten().contiguous(), best=None)
    return largest_of(words).contiguous(), cut


def largest_of(gathered: Tensor) -> Tensor:
    """Return the largest of all ranks' integers [W, ...]."""
    return gathered[0] if len(gathered) == 1 else gathered.amax(dim=0)


def _may_list(filters: RowFilters) -> bool:
    """Return whether the requests allow that one list has all tokens that these rows keep."""
    demand = filters.demand
    ties = any(kind.keep_ties for kind in filters.kinds)
    return demand.masses and not (demand.counts or ties or (filters.known and filters.unfiltered))


def _cut_of_list(
    rows: ShardLogits, thresholds: Thresholds, masses: Masses, ranks: Ranks, number: int
) -> tuple[Tensor, Cut] | None:
    """Return the tokens and the cut of rows from a list of all that they keep. Collective.

    Return None if a row may keep more than a list has, which the host reads from the device.
    """
    cuts = cuts_of(rows)
    cut, room = cuts.list_end(masses.bins, masses.total, thresholds.share, number)
    longest = max(room.tolist())
    if longest > MAX_WEIGHED_WORDS:
        return None
    gathered = ranks.gather_integers(cuts.words_from(cut, longest))
    first = rows.first_of(gathered, longest)
    words, of_first = _of_first(rows, first, thresholds._replace(total=masses.total))
    return words, of_first._replace(none_greedy=True)


def _of_first(rows: ShardLogits, first: Tensor, thresholds: Thresholds) -> tuple[Tensor, Cut]:
    """Return the tokens and the cut of rows whose first words, [F, k], contain their kept sets."""
    kept_set = rows.set_of_first(first, thresholds)
    rows = replace(rows, top=kept_set.top)
    return kept_set.words, Cut(rows, kept_set.cut, first, kept_set.held[None], drawn=kept_set.drawn)


def _by_rounds(
    rows: ShardLogits,
    filters: RowFilters,
    thresholds: Thresholds,
    ranks: Ranks,
    of_greedy: Tensor | None,
    *,
    draws: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return where kept sets end, int64 [F], and `Cut.best`, in fixed rounds. Collective."""
    least, total_cut, demand = thresholds.least, thresholds.least_of_total, filters.demand
    if not (demand.counts or demand.masses):
        return rows.last_cut(least, of_greedy=of_greedy), None
    cuts, keep_ties, share = cuts_of(rows), thresholds.keep_ties, None
    if demand.counts:
        found = _by_digits(rows, thresholds.most, ranks, mass=False)
    if demand.counts and demand.masses:
        by_number = cuts.last_digit(*found, keep_ties)
        before_top_p = by_number.masked_fill(filters.column(behind(TOP_K.name)), 0)
        least, total_cut = least.maximum(by_number), total_cut.maximum(before_top_p)
    if demand.masses:
        share = thresholds.share
        found = _by_digits(rows, None, ranks, share=share, least=total_cut, mass=True)
    last = *found, keep_ties, OtherEnds(least, share, of_greedy)
    if draws:
        best = cuts.best_of_last_digit(*last, weighs=of_greedy is not None)
        return best[:, -1], best
    return largest_of(ranks.gather_integers(cuts.last_digit(*last))), None


def _masses_of(rows: ShardLogits, ranks: Ranks, total_cut: Tensor) -> Masses:
    """Return the masses of rows; the total goes down to the words int64 [F]. Collective."""
    masses = ranks.sum_integers(cuts_of(rows).sums_of_bins(total_cut))
    return Masses(masses[:, BINS], masses[:, :BINS])


def _in_a_bin(
    rows: ShardLogits,
    bins: Tensor,
    limit: Tensor,
    keep_ties: Tensor,
    ranks: Ranks,
    least: Tensor | None,
    of_greedy: Tensor | None,
    *,
    share: Tensor | None = None,
    mass: bool,
) -> Tensor:
    """Return the word, int64 [F], at which the weight of descending words of all ranks reaches a
    limit; with ties="keep" the last word of the same logit.

    The ranks gather the words of the bin in which it is reached. Only a row with more words there
    than a rank lists goes on by digits: one with ties, or with most of its ids below y = -32.

    Args:
        bins, limit, share: as in `Cuts.bin_of`.
        least, of_greedy: as in `Cuts.cut_of`.
        mass: whether a token's weight is its mass, or one.
    """
    cuts = cuts_of(rows)
    room = _room(cuts, bins, limit, share, ranks.world_size, mass=mass)
    search, own = cuts.search_bins(bins, limit, room, share)
    listed = ranks.gather_integers(own)
    cut, left = cuts.cut_of(search, listed, keep_ties, mass=mass, least=least, of_greedy=of_greedy)
    undecided = [row for row, open_ in enumerate(left.tolist()) if open_]
    if undecided:
        index = index_of(undecided, cut.device)
        some = replace(rows, tile_words=None).select(index)
        found = _by_digits(some, search.limit[index], ranks, mass=mass)
        own = cuts_of(some).last_digit(*found, keep_ties[index])
        words = largest_of(ranks.gather_integers(own))
        if least is not None:
            kept = None if of_greedy is None else of_greedy[index]
            words = some.last_cut(least[index].maximum(words), of_greedy=kept)
        cut[index] = words
    return cut


def _room(
    cuts: Cuts, bins: Tensor, limit: Tensor, share: Tensor | None, world_size: int, *, mass: bool
) -> int:
    """Return how many words of a row's bin each rank lists; the same on every rank.

    All rows of a message have equally long lists. If a few rows need long ones, and the message
    would be too large, these rows are left to a search by digits.
    """
    wanted = [LISTED]
    if readable(bins.device):
        most = max(LISTED, int(cuts.rows.vocab_size * MOST_LISTED))
        bounds = cuts.words_in_bin(bins, limit, share, mass=mass).tolist()
        wanted = [bound if bound <= most else LISTED for bound in bounds]
    rooms = [min(n, 2 * max(LISTED, n) // (1 + world_size)) for n in wanted]
    room = max([1, *rooms])
    if room * len(rooms) > max(MAX_PAYLOAD, 2 * sum(rooms)):
        return min(room, 2 * LISTED // (1 + world_size))
    return room


def _by_digits(
    rows: ShardLogits,
    limit: Tensor | None,
    ranks: Ranks,
    *,
    share: Tensor | None = None,
    least: Tensor | None = None,
    mass: bool,
) -> tuple[Search, LastDigits]:
    """Search in four rounds, and return the arguments of `Cuts.last_digit`: the search before the
    last digit, and the histograms of that digit. Collective.

    Args:
        limit: int64 [F] >= 1. A limit above the row's whole weight stands for the whole weight.
            None takes `share`, float64 [F], of the weight down to the words `least`, int64 [F].
    """
    prefix, reached = rows.logits.new_zeros(2, len(rows.logits), dtype=torch.int64).unbind()
    search = Search(prefix, reached, prefix if limit is None else limit)
    first, *shifts = range(word.EPOCH_SHIFT - DIGIT_BITS, word.TOKEN_BITS - 1, -DIGIT_BITS)
    cuts = cuts_of(rows)
    empty, *others = cuts.empty_digits(1 + len(shifts), mass=mass)
    search, own = cuts.digits(search, None, first, None, empty, mass=mass, least=least)
    for shift, empty in zip(shifts, others, strict=True):
        bins = ranks.sum_integers(own)
        search, own = cuts.digits(search, bins, shift, share, empty, mass=mass)
        share = None
    return search, LastDigits(*ranks.gather_by_ids(own), mass)


def kept_sets_of(cut: Cut, batch: BatchView, ranks: Ranks, drawn: Tensor) -> KeptSets:
    """Return the tokens of every row that could have been drawn, of a batch with a `kept_cap`.

    Collective. A kept set is a prefix of the total order, so each rank's part of it is the first
    words of its own order. If first words have decided all rows, nothing more is sent. Otherwise a
    row costs every rank 8 (W - 1) · n bytes for words. Here n is the largest number of words that a
    rank has of a listed row. Masses and sizes cost 16 (W - 1) bytes, unless they came with the
    token. A row over the cap is reported as an overflow, so it sends no words. Nor does a row that
    kept all ids.

    Args:
        cut: where the sets of all rows of the step end.
        batch: its rows. Where the host may not read how many words there are, n is min(cap, V). The
            sets then lie in memory for as many ids of every row.
        drawn: bool [R], the rows that drew a token. Padding never does, and a row may have none
            whose masks and filters left some (`KeptSets`).
    """
    rows, held, cuts, cap = cut.rows, cut.held, cuts_of(cut.rows), batch.plan.kept_cap
    assert cap is not None
    if held is None:
        held = ranks.gather_integers(rows.held_from(cut.words))
    sets = cuts.set_sizes(held, cut.words, cap, drawn)
    width = longest = min(cap, rows.vocab_size)
    total = len(cut.words) * longest
    if batch.may_read and total:
        width, longest, total = sets.needed.tolist()
    if cut.first is not None:
        words = cut.first[:, :longest]
    elif not width:
        words = sets.cut.new_empty(len(sets.cut), 0)
    else:
        gathered = ranks.gather_integers(cuts.words_from(sets.cut, width))
        words = gathered.transpose(0, 1).flatten(1)
        if len(gathered) > 1:
            words = words.topk(longest, dim=1).values
    token_ids, log_masses = cuts.listed_sets(words, sets, total)
    return KeptSets(
        offsets=sets.offsets,
        token_ids=token_ids,
        log_masses=log_masses,
        sizes=sets.sizes,
        whole=sets.whole,
        overflow=sets.overflow,
    )
