"""Samples rows whose kept sets something else needs, too: the sets themselves, or logprobs of them.

Where a set ends decides the token as well, so these rows do not go by the methods of
`tpsample.filters.sample`: if first words decide each of them, all go by first words, and else all
begin with the search.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpsample.backends.torch_.passes import ShardLogits
from tpsample.filters.kept_sets import Cut, cut_of_first, search
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
        number: how many first tokens of a row something is told of.
        may_read: as in `sample_filtered`.
        gathered: the `own_first_words` of all ranks, if the words brought them.
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
    if words is not None:
        return words, cut
    if not sets:
        best = ranks.gather_integers(rows.best_kept(cut.words))
        return best[0] if len(best) == 1 else best.amax(dim=0), cut
    best, held = _best_and_held(rows, cut, ranks)
    if rows.rough is not None:
        # Rows without filters store upper ends: their sets are counted, and weighed if not whole.
        partial = held[:, :, 1].sum(dim=0) < rows.vocab_size
        partial &= rows.noise.random.squeeze(1)
        if partial[filters.unfiltered].any():
            rows = rows.exact()
            best, held = _best_and_held(rows, cut, ranks)
    return best.amax(dim=0), cut._replace(rows=rows, held=held)


def own_first_words(rows: ShardLogits, filters: RowFilters) -> Tensor:
    """Return what this rank sends first, int64 [F, n]: its largest word if the search follows."""
    return rows.first_words(filters.demand.first if filters.by_first_words == {True} else 1)


def _best_and_held(rows: ShardLogits, cut: Cut, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return of each rank the best score words down to a cut, and mass and number of the kept."""
    gathered = ranks.gather_integers(rows.best_and_mass(cut.words))
    best, held = gathered.split([rows.noise.num_samples, 2], dim=2)
    return best, held
