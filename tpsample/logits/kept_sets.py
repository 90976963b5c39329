"""Reports the kept sets of filtered rows: which tokens could have been drawn, for training.

A kept set is a prefix of the total order, so once its last token is known (`tpsample.logits.cut`)
each rank's part of it is the first words of its own order. Beside that search, a row costs every
rank 8 (W - 1) bytes for the sizes and 8 (W - 1) · n bytes for the words, where n is the most words
that one rank has of a row that fits. A row whose set is over the cap sends no words, because it is
reported as an overflow and never cut short.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tpsample.core import word
from tpsample.core.order import TOP_MASS, below_top
from tpsample.logits.cut import find_cut
from tpsample.logits.shard_logits import ShardLogits
from tpsample.output import KeptSets
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters


def find_kept_sets(rows: ShardLogits, filters: RowFilters, cap: int, ranks: Ranks) -> KeptSets:
    """Return the kept set of every filtered row. Collective; waits for the GPU.

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
