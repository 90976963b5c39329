"""Samples rows whose kept sets something else needs, too: the sets themselves, or logprobs of them.

The end of a set decides the token as well, so these rows do not take the methods of
`tpsample.filters.sample`. If first words decide every row, all take first words. Otherwise all
begin with the search.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.filters.kept_sets import Cut, best_of_cut, cut_of_first, search
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters


def sample_by_cuts(
    rows: ShardLogits,
    filters: RowFilters,
    ranks: Ranks,
    *,
    sets: bool,
    number: int = 1,
    may_read: bool = True,
    gathered: Tensor | None = None,
) -> tuple[Tensor, Cut]:
    """Return what `sample_filtered` does, and where the kept sets of all rows end. Collective.

    Args:
        sets: whether the sets are wanted: the kept tokens are then counted and weighed, and the set
            of a greedy row is its token. Else it ends where its logprobs do, at the last token.
        number: how many of a row's first tokens are reported.
        may_read: as in `sample_filtered`.
        gathered: the `own_first_words` of all ranks, if they came with the words.
    """
    if gathered is None:
        gathered = ranks.gather_integers(own_first_words(rows, filters))
    if filters.by_first_words == {True}:
        return cut_of_first(rows, filters, ranks, gathered)
    top_word, top = rows.top_of(gathered)
    rows = replace(rows, top=top)
    if may_read and filters.demand.weighed:
        ranks.counters.second_rounds += len(filters)
    of_greedy = top_word if sets else None
    words, cut = search(rows, filters, ranks, may_read=may_read, number=number, of_greedy=of_greedy)
    if sets and rows.rough is not None and cut.first is None:
        # Rows without filters store upper ends: their sets are counted, and weighed if not whole.
        assert cut.held is not None
        partial = cut.held[:, :, 1].sum(dim=0) < rows.vocab_size
        partial &= rows.noise.random.squeeze(1)
        if partial[filters.unfiltered].any():
            return best_of_cut(cut._replace(rows=rows.exact()), ranks, weighs=True)
    return words, cut


def own_first_words(rows: ShardLogits, filters: RowFilters) -> Tensor:
    """Return the first words that this rank sends, int64 [F, n]; one if the search follows."""
    return rows.first_words(filters.demand.first if filters.by_first_words == {True} else 1)
