"""Samples from kept sets on vocabulary shards, exactly, while no logit leaves its rank.

A row's token is the best score in its kept set. Each of three methods returns the token of
`tpsample.reference`. The request decides with which method a row begins:

first words  sends each rank's first k tokens of the order. The first k of these are the first k of
             the vocabulary, with which every rank finishes alone, after one exchange. It serves
             top_k <= 256 with exact ties, alone or with a top_p. A top_p that takes a share of
             more tokens needs a second exchange, which sums their mass.
rejection    takes the first token in descending score that is in the kept set. Whether a token is
             in it follows from its logit, and from the number and the mass of the tokens before it.
             Exchange 1 gathers each rank's 8 best scores; up to 32 on a CPU, where the filters may
             keep little (`RowFilter.num_best`). Exchange 2 sums number and mass before those
             candidates that precede every better score in the order. Another candidate needs no
             sums: a set that keeps it also keeps one of these, whose score is better. If none is
             kept, the row is undecided. Kernels sum masses in fp32, which is far quicker, and know
             a bound of the error. A row that depends on the error is undecided, too.
search       looks for the last kept token (`tpsample.filters.kept_sets`), then takes the best score
             down to it, from a list of the kept tokens if that is short. It decides the undecided
             rows. Rows with a top_p of what a top_k over 256 leaves, or one with ties, begin with
             it. That top_p is a share of a mass that only this search finds. Rows with neither
             top_k nor top_p begin with it, too: where their sets end follows from the largest
             logit, and nothing is searched. Its first exchange gathers each rank's largest logit.

If a step also reports kept sets, their ends decide the tokens (`tpsample.filters.by_cuts`).

Where ranks meet on the host, the first exchange of each method travels with the words.

The host reads from the device which rows are undecided, and only these are searched. All ranks
read the same rows, because they follow from summed integers. In fixed rounds, as while a CUDA graph
is captured, the host reads nothing, so the launches of a step follow from its requests alone. Every
method then takes all rows. A program whose row is done ends at once, and a done row exchanges
zeros. Rows that only a search decides begin with the rejection if other rows do, so that one search
serves all.

Where the local step stored upper ends of logits in place of logits, exchange 2 sums lower and upper
bounds. A row that they leave open gets its logits, and its method begins anew.

The best score of a set is a Gumbel-max draw from that set, so the first member is an exact draw
from the filtered softmax. FlashInfer's sorting-free rejection sampling draws anew in every round;
here one draw of noise per token id serves, so the number of rounds cannot change the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core.row_noise import has_all
from tpsample.filters.kept_sets import search
from tpsample.filters.thresholds import thresholds_of, thresholds_of_first
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, index_of
from tpsample.request.row_filter import BY_FIRST_WORDS, SEARCHED, Method


def sample_filtered(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    may_read: bool = True,
    gathered: list[Tensor] | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return the winning score words of filtered rows, int64 [F, num_samples], on every rank.

    Collective. `word.decode` can make tokens and status of the words: a row with a NaN has a NaN's
    word, and a row without an unmasked token has 0.

    Args:
        may_read: whether the host may read from the device which rows are undecided. If not, the
            number of exchanges and their sizes follow from the requests.
        gathered: the `own_candidates` of all ranks, if the words brought them.
        first: int64 [F, n], first words of all rows, at least as many as the filters need. They
            may be passed where the host reads nothing; None to find them.
    """
    methods = list(_methods(rows, filters, may_read))  # once, because rows of some are copies
    if gathered is None:
        own = [
            _candidates(method, part_filters, part, first)
            for method, _, part_filters, part in methods
        ]
        gathered = [ranks.gather_integers(candidates) for candidates in own]
    found = []
    for (method, _, part_filters, part), candidates in zip(methods, gathered, strict=True):
        match method:
            case Method.FIRST_WORDS:
                part_words = _by_first_words(part, part_filters, ranks, candidates)
            case Method.SEARCH:
                part_words = _by_search(part, part_filters, ranks, candidates, may_read=may_read)
            case Method.REJECTION:
                best = part.merged(candidates, part.num_best)
                part_words = _by_rejection(part, part_filters, ranks, best, may_read=may_read)
        found.append(part_words)
    if len(found) == 1:  # of all rows
        return found[0]
    words = rows.logits.new_empty(len(filters), rows.noise.num_samples, dtype=torch.int64)
    for (_, index, _, _), part_words in zip(methods, found, strict=True):
        words = put(words, index, part_words)
    return words


def own_candidates(rows: ShardLogits, filters: RowFilters, *, may_read: bool) -> list[Tensor]:
    """Return what this rank sends in the first exchange of each method that rows begin with."""
    methods = _methods(rows, filters, may_read)
    return [_candidates(method, part_filters, part) for method, _, part_filters, part in methods]


def _candidates(
    method: Method, filters: RowFilters, rows: ShardLogits, first: Tensor | None = None
) -> Tensor:
    """Return what this rank sends in the first exchange of a method."""
    match method:
        case Method.REJECTION:
            return rows.best_scores(rows.num_best)
        case Method.SEARCH:
            return rows.first_words(1)
        case Method.FIRST_WORDS:
            if first is None:
                return rows.first_words(filters.demand.first)
            return rows.of_undone(first[:, : filters.demand.first])


def _methods(
    rows: ShardLogits, filters: RowFilters, may_read: bool
) -> Iterator[tuple[Method, Tensor | slice, RowFilters, ShardLogits]]:
    """Yield each method with the rows that begin with it, as an index or as bool [F], their
    filters, and their logits."""
    if may_read and filters.known:
        for method, index, part_filters in filters.methods:
            yield _first_method(method, part_filters, rows), index, part_filters, rows.select(index)
        return
    for method in (Method.FIRST_WORDS, Method.REJECTION):
        by_first = method is Method.FIRST_WORDS
        if filters.by_first_words == {by_first}:
            yield _first_method(method, filters, rows), slice(0, len(filters)), filters, rows
        elif by_first in filters.by_first_words:
            kinds = [kind for kind in filters.kinds if bool(kind.demand.first) is by_first]
            column = filters.column(BY_FIRST_WORDS)
            mask = column if by_first else ~column
            part_filters = replace(filters, kinds=kinds)
            yield _first_method(method, part_filters, rows), mask, part_filters, rows.without(~mask)


def _first_method(method: Method, filters: RowFilters, rows: ShardLogits) -> Method:
    """Return the method with which rows begin, if their requests say `method`.

    Rows of the rejection begin with the search if only the search decides all of them, or if their
    ends are known without a search. Where the local step has stored upper bounds, its best scores
    decide rows with min_p in one exchange.
    """
    if method is not Method.REJECTION or rows.rough is not None:
        return method
    searched = filters.known and all(kind.demand.searched for kind in filters.kinds)
    return Method.SEARCH if searched or not filters.demand.weighed else method


def _by_first_words(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, gathered: Tensor
) -> Tensor:
    """Return words [F, num_samples], from the first k tokens of each rank, [W, F, k]. Collective
    as `thresholds_of_first` is."""
    first = rows.first_of(gathered, gathered.shape[2])
    bounds = thresholds_of_first(rows, first, filters, ranks)
    words, *others = (rows.best_of_first(first, bound) for bound in bounds)
    if not others:
        return words
    # The greater the total, the larger the set: a token of both bounds is that of the total.
    differ = (words != others[0]).any(dim=1).tolist()
    undecided = [row for row, differs in enumerate(differ) if differs]
    if not undecided:
        return words
    index = index_of(undecided, words.device)
    left, of_left = rows.select(index).exact(), filters.select(undecided, index)
    return put(words, index, _by_first_words(left, of_left, ranks, gathered[:, index]))


def _by_rejection(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, best: Tensor, *, may_read: bool
) -> Tensor:
    """Return words [F, num_samples], those of undecided rows by the search. Collective.

    Args:
        best: int64 [F, …], the merged `best_scores` of all ranks.
    """
    if filters.demand.ends and rows.top is None:
        rows = replace(rows, top=rows.top_of(best.unsqueeze(0))[1])
    thresholds = thresholds_of(rows, filters, ranks)
    judged, count = rows, best.shape[1] // (2 * rows.noise.num_samples)
    if filters.demand.weighed:
        sums = ranks.sum_integers(rows.before(best, thresholds, count))
    else:  # whether a token is kept follows from its logit alone
        judged, sums = rows.as_exact(), best.new_zeros(best.shape)
    words, decided, top = judged.first_kept(best, sums, thresholds, count)
    if filters.demand.searched:
        decided &= ~filters.column(SEARCHED) | top.isnan()

    if not may_read:
        left = replace(rows.without(decided), top=top)
        undecided_words, _ = search(left, filters, ranks, may_read=False, thresholds=thresholds)
        return torch.where(decided.unsqueeze(1), words, undecided_words)
    undecided = [row for row, done in enumerate(decided.tolist()) if not done]
    if not undecided:
        return words
    index = index_of(undecided, words.device)
    # A search looks for nothing in tiles.
    left = replace(rows, top=top, tile_words=None).select(index)
    left_filters = filters.select(undecided, index)
    if rows.rough is not None:
        left = left.exact()
        undecided_words = _by_rejection(left, left_filters, ranks, best[index], may_read=True)
    else:
        ranks.counters.second_rounds += len(undecided)
        ends = left_filters.thresholds(thresholds.least[index], thresholds.least_of_total[index])
        undecided_words, _ = search(left, left_filters, ranks, may_read=True, thresholds=ends)
    return put(words, index, undecided_words)


def _by_search(
    rows: ShardLogits, filters: RowFilters, ranks: Ranks, gathered: Tensor, *, may_read: bool
) -> Tensor:
    """Return words [F, num_samples], from the first word of each rank, [W, F, 1]. Collective."""
    rows = replace(rows.exact(), top=rows.top_of(gathered)[1])
    if may_read and filters.demand.weighed:
        ranks.counters.second_rounds += len(filters)
    return search(rows, filters, ranks, may_read=may_read)[0]


def put(words: Tensor, index: Tensor | slice, values: Tensor) -> Tensor:
    """Put words of some rows in place. Nothing is copied if a slice has all rows."""
    if has_all(index, words.shape[0]):
        return values
    if isinstance(index, slice):
        words[index] = values
        return words
    if index.dtype == torch.bool:
        return torch.where(index.unsqueeze(1), values, words)
    return words.index_copy(0, index, values)
