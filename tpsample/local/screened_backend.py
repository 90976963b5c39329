"""The local step of a CPU: a cheap product finds the tokens that can win, and these are computed.

The words are those of `TorchBackend`, bit for bit; `tpsample.screening` says why. The definition's
way is taken where the screen cannot help:

    a whole step    fp32 products are not made in fp32, the logits are the caller's, or most rows
                    need all of theirs
    a row           it needs all of its logits: logprobs, kept sets, and filters that weigh what
                    they do not keep (`tpsample.request.bounded_rows`)
    a filtered row  on this rank, or this part: no bound is proved, or it can keep more ids than
                    `candidates.limit`
    a row's tile    no bound is proved (a number that is not finite, or above 2^100), or it has more
                    candidates than `candidates.limit`
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.host_tensors import integers
from tpsample.core.score import Head, head_logits
from tpsample.core.step_buffer import StepBuffer
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.filtered_screen import FilteredScreen
from tpsample.local.torch_backend import TorchBackend
from tpsample.output import Screened
from tpsample.request.plan import BatchPlan
from tpsample.request.step import Push, Step, StepRows
from tpsample.screening import bound
from tpsample.screening.candidates import BLOCK, UpperScores, limit
from tpsample.screening.fp32_pass import Fp32Pass
from tpsample.screening.int8_copy import Int8Copy
from tpsample.screening.int8_pass import Int8Pass
from tpsample.screening.noise_bound import Pairs, TileNoise
from tpsample.screening.pairs import HeadTile, pair_words


class FirstPass(Protocol):
    """What makes the approximate products.

    Attributes:
        row_bytes: bytes that it reads of one id.
    """

    @property
    def row_bytes(self) -> int: ...

    def available(self) -> bool:
        """Return whether the bounds hold now."""

    def tile(self, rows: StepRows, start: int, stop: int) -> bound.Approximation:
        """Return approximate products of the weight rows from `start` to `stop`."""


class RowKinds(NamedTuple):
    """The rows of a step by what they need: int64 indices, and places among the stored rows.

    Attributes:
        plain: rows that store no logits.
        bounded: filtered rows that need few of them.
        whole: rows that need all of them.
        drawn: places, among the whole rows, of those that are not filtered.
    """

    plain: Tensor
    bounded: Tensor
    whole: Tensor
    bounded_places: Tensor
    whole_places: Tensor
    drawn: Tensor

    @staticmethod
    def of(plan: BatchPlan, num_rows: int) -> RowKinds:
        """Sort the rows of a batch that stores some."""
        stored, bounded = plan.stored_list, set(plan.bounded)
        plain = sorted(set(range(num_rows)).difference(stored))
        others = [place for place in range(len(stored)) if place not in bounded]
        # The stored rows begin with the filtered ones.
        num_filtered = 0 if plan.filters is None else len(plan.filters)
        drawn = [i for i, place in enumerate(others) if place >= num_filtered]
        return RowKinds(
            *integers(
                plain,
                [stored[place] for place in plan.bounded],
                [stored[place] for place in others],
                plan.bounded,
                others,
                drawn,
                device="cpu",
            )
        )


def approximate_logits(
    approximation: bound.Approximation, rows: StepRows, tile: HeadTile
) -> Tensor:
    """Return fp32 [B, n], made of approximate products as logits are of products."""
    logits = head_logits(approximation.product, tile.bias, tile.head)
    return logits if rows.controls is None else rows.controls.apply(logits, tile.first_id)


class ScreenedBackend(TorchBackend):
    """`TorchBackend` behind a first pass.

    Args:
        copy: the 8-bit copy of the weight that the first pass reads; default the weight itself.
    """

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        copy: Int8Copy | None = None,
    ) -> None:
        super().__init__(weight, shard, bias, head, rounds=rounds)
        self.copy = copy
        self._first_pass: FirstPass = Fp32Pass(weight) if copy is None else Int8Pass(copy)
        self._upper_ends = StepBuffer(len(shard) + BLOCK, torch.float32, weight.device)

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        rows, plan = step.rows, step.batch.plan
        num_whole = len(plan.stored_list) - len(plan.bounded)
        has_product = step.local_logits is None and self._first_pass.available()
        if 2 * num_whole > len(rows) or not has_product:
            super().best_words(step, words, part, parts, push)
            return
        assert push is None, "plain PyTorch writes to no peer"
        best = words.view(step.noise.num_samples, len(rows))
        tiles = self.tiles(len(rows), part, parts)
        if plan.stored_index is not None:
            self._mixed_rows(step, best, tiles)
            return
        rows.noise.make_streams_on_host()
        for start, stop in tiles:
            approximation = self._approximate(rows, start, stop, step.counts)
            self._screened_tile(rows, approximation, start, stop, best, step.counts)

    def _mixed_rows(self, step: Step, best: Tensor, tiles: list[tuple[int, int]]) -> None:
        """Do a part of a step some of whose rows store their logits; `best` is [num_samples, B].

        Rows that store none, and those that need few, share the first pass.
        """
        if not tiles:
            return
        counts, kinds = step.counts, RowKinds.of(step.batch.plan, len(step.rows))
        plain, bounded, whole = kinds.plain, kinds.bounded, kinds.whole
        screened = torch.cat([plain, bounded])
        rows = step.rows.select(screened)
        plain_rows, bounded_rows = step.rows.select(plain), step.rows.select(bounded)
        whole_rows = step.rows.select(whole)
        drawn, noise = whole[kinds.drawn], whole_rows.noise.select(kinds.drawn)
        plain_rows.noise.make_streams_on_host()
        noise.make_streams_on_host()
        plain_best, drawn_best = best[:, plain], best[:, drawn]
        of_plain, of_bounded = (
            counts and Screened.none(len(each), counts.num_ids, best.device)
            for each in (plain, bounded)
        )
        first, last = tiles[0][0], tiles[-1][1]
        memory = self._upper_ends.take(len(bounded))
        filtered = FilteredScreen(bounded_rows, memory, self._head_tile(first, last))
        for start, stop in tiles:
            approximation = self._approximate(rows, start, stop, of_plain)
            if len(plain):
                of_rows = approximation.rows(0, len(plain))
                self._screened_tile(plain_rows, of_rows, start, stop, plain_best, of_plain)
            if len(bounded):
                of_rows = approximation.rows(len(plain), len(screened))
                tile = self._head_tile(start, stop)
                bounds = bound.of_logits(
                    of_rows, bounded_rows, self._head, tile.bias, tile.first_id
                )
                logits = approximate_logits(of_rows, bounded_rows, tile)
                slack = bounds.of(of_rows.error)
                filtered.add_tile(logits, slack, bounds.proved, start - first)
            if len(whole):
                raw, processed = self.tile_logits(whole_rows, start, stop)
                self.raise_best(drawn_best, processed[kinds.drawn], start, noise)
                self.store(step, kinds.whole_places, start, raw, processed)
        best[:, plain], best[:, drawn] = plain_best, drawn_best
        if len(bounded):
            left = filtered.store(step, kinds.bounded_places, slice(first, last), of_bounded)
            self._store_whole(step, bounded_rows, kinds.bounded_places, left, tiles, of_bounded)
        if counts is not None:
            for index, part in ((plain, of_plain), (bounded, of_bounded)):
                if part is not None:
                    counts.add(index, part)
            counts.whole[whole] += last - first
            counts.num_bytes += (last - first) * self.row_bytes * bool(len(whole))

    def _store_whole(
        self,
        step: Step,
        rows: StepRows,
        places: Tensor,
        chosen: Tensor,
        tiles: list[tuple[int, int]],
        counts: Screened | None,
    ) -> None:
        """Store all logits of the chosen rows, bool [B], as the definition does."""
        index = chosen.nonzero().squeeze(1)
        if not len(index):
            return
        some = rows.select(index)
        for start, stop in tiles:
            raw, processed = self.tile_logits(some, start, stop)
            self.store(step, places[index], start, raw, processed)
            if counts is not None:
                counts.whole[index] += stop - start
                counts.num_bytes += (stop - start) * self.row_bytes

    def _approximate(
        self, rows: StepRows, start: int, stop: int, counts: Screened | None
    ) -> bound.Approximation:
        if counts is not None:
            counts.num_bytes += (stop - start) * self._first_pass.row_bytes
        return self._first_pass.tile(rows, start, stop)

    def _head_tile(self, start: int, stop: int) -> HeadTile:
        bias = None if self._bias is None else self._bias[start:stop]
        return HeadTile(self._shard.start + start, self._weight[start:stop], bias, self._head)

    def _screened_tile(
        self,
        rows: StepRows,
        approximation: bound.Approximation,
        start: int,
        stop: int,
        best: Tensor,
        counts: Screened | None,
    ) -> None:
        """Raise `best`, int64 [num_samples, B], to the best words of a tile."""
        tile = self._head_tile(start, stop)
        bounds = bound.of_scores(approximation, rows, self._head, tile.bias, tile.first_id)
        logits = approximate_logits(approximation, rows, tile)
        slack, undecided = bounds.of(approximation.error), ~bounds.proved
        draws = bool(rows.noise.random.any())
        for sample, best_of in enumerate(best):
            noise = TileNoise(rows.noise, sample, tile.first_id, stop - start) if draws else None
            upper = UpperScores(logits, slack, noise, rows.noise)
            undecided |= self._raise(best_of, upper, rows, noise, tile, counts)
        if undecided.any():
            index = undecided.nonzero().squeeze(1)
            if counts is not None:
                counts.whole[index] += stop - start
                counts.num_bytes += (stop - start) * self.row_bytes
            whole_rows, whole_best = rows.select(index), best[:, index]
            logits = self.tile_logits(whole_rows, start, stop)[1]
            self.raise_best(whole_best, logits, start, whole_rows.noise)
            best[:, index] = whole_best

    def _raise(
        self,
        best: Tensor,
        upper: UpperScores,
        rows: StepRows,
        noise: TileNoise | None,
        tile: HeadTile,
        counts: Screened | None,
    ) -> Tensor:
        """Raise `best`, int64 [B], by a tile's candidates; return the rows with too many, bool [B].

        The likeliest id of a row is computed first, because its score is the bar for the others.
        """

        def compute(pairs: Pairs) -> None:
            if counts is not None:
                counts.candidates += torch.bincount(pairs.rows, minlength=len(rows))
                counts.num_bytes += len(pairs.rows) * self.row_bytes
            values = torch.zeros_like(pairs.rows) if noise is None else noise.exact(pairs)
            words = pair_words(pairs, values, rows, tile)
            best.scatter_reduce_(0, pairs.rows, words, "amax")

        highest = upper.highest()
        compute(highest)
        found = upper.at_least(word.value_of(best))
        found = found.keep(found.columns != highest.columns[found.rows])
        if len(found.rows) == 0:
            return torch.zeros_like(best, dtype=torch.bool)
        too_many = torch.bincount(found.rows, minlength=len(rows)) > limit(len(tile.weight))
        few = found.keep(~too_many[found.rows])
        if len(few.rows):
            compute(few)
        return too_many
