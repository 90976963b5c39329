"""The filtered rows of a screened step on a CPU: which of their logits can be kept, and only these.

The bounds of all tiles of a part come first, because only they show which ids can be kept, see
`tpsample.screening.filter_bars`. Then the logits of these ids are computed as the definition does
and stored; every other id's is stored as -inf. The filters that run over the stored logits know
nothing of it. A filtered row has no word, because its filters replace it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.output import Screened
from tpsample.request.bounded_rows import row_bounds
from tpsample.request.step import Step, StepRows
from tpsample.screening.candidates import BLOCK, at_least, limit
from tpsample.screening.filter_bars import filter_bars, group_tops
from tpsample.screening.pairs import HeadTile, pair_logits


class FilteredScreen:
    """The bounds of some filtered rows over one part of a shard.

    Args:
        rows: the rows.
        memory: fp32 [≥ B, ≥ n], which the upper ends are kept in meanwhile.
        part: the part as one tile: its n ids, their weights and the head.
    """

    def __init__(self, rows: StepRows, memory: Tensor, part: HeadTile) -> None:
        self._rows, self._part, self._num_ids = rows, part, len(part.weight)
        width = -(-self._num_ids // BLOCK) * BLOCK
        self._upper = memory[: len(rows), :width]
        self._upper[:, self._num_ids :] = -torch.inf
        self._lower: list[Tensor] = []
        self._proved = torch.ones(len(rows), dtype=torch.bool)

    def add_tile(self, logits: Tensor, slack: Tensor, proved: Tensor, first: int) -> None:
        """Take the approximate logits of the part's ids from `first` on, fp32 [B, n].

        Args:
            slack: fp32 [B, 1] or [B, n], how far they may be off.
            proved: bool [B], whether they are not.
        """
        torch.add(logits, slack, out=self._upper[:, first : first + logits.shape[1]])
        self._lower.append(group_tops(logits - slack))
        self._proved &= proved

    def store(self, step: Step, places: Tensor, columns: slice, counts: Screened | None) -> Tensor:
        """Store the logits that can be kept; return the rows of which nothing was stored, bool [B].

        Those are rows without a proof, or with more ids than `limit`.

        Args:
            places: int64 [B], where the rows are among the stored ones.
            columns: of the part in the stored logits.
        """
        rows, filters, memory = self._rows, step.batch.plan.filters, step.logits
        assert filters is not None and memory is not None
        # The stored rows begin with the filtered ones, in the same order.
        top_k, log_min_p = (each[places] for each in row_bounds(filters, step.batch.vocab_size))
        bars = filter_bars(torch.cat(self._lower, dim=1), top_k, log_min_p, rows.noise.temperature)
        blocks = self._upper.unflatten(1, (-1, BLOCK))
        found = at_least(blocks, blocks.amax(dim=2), bars.where(self._proved, torch.nan))
        number = torch.bincount(found.rows, minlength=len(rows))
        stored = self._proved & (number <= limit(self._num_ids))
        few = found.keep(stored[found.rows])
        if counts is not None:
            counts.candidates += number * stored
            row_bytes = self._part.weight.shape[1] * self._part.weight.itemsize
            counts.num_bytes += len(few.rows) * row_bytes
        processed = memory[len(step.batch.plan.stored_list) :]
        for kept in (memory, processed) if len(processed) else (memory,):
            kept[places[stored], columns] = -torch.inf
        if len(few.rows):
            into = places[few.rows], few.columns + columns.start
            logits = pair_logits(few, rows, self._part)
            for kept, values in zip((memory, processed), logits, strict=True):
                if len(kept):
                    kept[into] = values
        return ~stored
