"""The local step of a CPU: a cheap product finds the tokens that can win, and these are computed.

The words are those of `TorchBackend`, bit for bit; `tpsample.screening` says why. The definition's
way is taken where the screen cannot help:

    a whole step    fp32 products are not made in fp32, the logits are the caller's, or most rows
                    store theirs
    a row           it stores its logits (filters, logprobs)
    a row's tile    no bound is proved (a number that is not finite, or above 2^100), or it has more
                    candidates than `candidates.limit`
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import Head, head_logits
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.torch_backend import TorchBackend
from tpsample.output import Screened
from tpsample.request.step import Push, Step, StepRows
from tpsample.screening import bound
from tpsample.screening.candidates import UpperScores, limit
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

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        rows, stored = step.rows, step.batch.plan.stored_index
        num_stored = 0 if stored is None else len(stored)
        has_product = step.local_logits is None and self._first_pass.available()
        if 2 * num_stored > len(rows) or not has_product:
            super().best_words(step, words, part, parts, push)
            return
        assert push is None, "plain PyTorch writes to no peer"
        rows.noise.make_streams_on_host()
        best = words.view(step.noise.num_samples, len(rows))
        tiles = self.tiles(len(rows), part, parts)
        if stored is None:
            for start, stop in tiles:
                self._screened_tile(rows, start, stop, best, step.counts)
            return
        is_stored = torch.zeros(len(rows), dtype=torch.bool, device=words.device)
        is_stored[stored] = True
        other = (~is_stored).nonzero().squeeze(1)
        stored_rows, other_rows = rows.select(stored), rows.select(other)
        stored_best, other_best = best[:, stored], best[:, other]
        every = torch.arange(num_stored, device=words.device)
        counts = None
        if step.counts is not None:
            counts = Screened.none(len(other_rows), step.counts.num_ids, words.device)
        for start, stop in tiles:
            self.full_tile(stored_rows, start, stop, stored_best, step.logits, every)
            self._screened_tile(other_rows, start, stop, other_best, counts)
            if step.counts is not None:
                step.counts.whole[stored] += stop - start
                step.counts.num_bytes += (stop - start) * self.row_bytes
        if counts is not None and step.counts is not None:
            step.counts.add(other, counts)
        best[:, stored], best[:, other] = stored_best, other_best

    def _screened_tile(
        self, rows: StepRows, start: int, stop: int, best: Tensor, counts: Screened | None
    ) -> None:
        """Raise `best`, int64 [num_samples, B], to the best words of a tile."""
        if counts is not None:
            counts.num_bytes += (stop - start) * self._first_pass.row_bytes
        bias = None if self._bias is None else self._bias[start:stop]
        tile = HeadTile(self._shard.start + start, self._weight[start:stop], bias, self._head)
        approximation = self._first_pass.tile(rows, start, stop)
        bounds = bound.of_scores(approximation, rows, self._head, bias, tile.first_id)
        logits = head_logits(approximation.product, bias, self._head)
        if rows.controls is not None:
            logits = rows.controls.apply(logits, tile.first_id)
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
            full_best = best[:, index]
            self.full_tile(rows.select(index), start, stop, full_best)
            best[:, index] = full_best

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
