"""The local step of a CPU: a cheap product finds the tokens that can win, and these are computed.

The words are those of `TorchBackend`, bit for bit; `tpsample.screening` says why. The definition's
way is taken where the screen cannot help:

    a whole step    fp32 products are not made in fp32, or most rows store their logits
    a row           it stores its logits (filters, logprobs)
    a row's tile    no bound is proved (a number that is not finite, or above 2^100), or it has more
                    candidates than `candidates.limit`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import Head, head_logits
from tpsample.core.vocab_shard import VocabShard
from tpsample.local.torch_backend import TorchBackend
from tpsample.request.step import Push, Step, StepRows
from tpsample.screening import bound
from tpsample.screening.candidates import Pairs, UpperScores, limit
from tpsample.screening.fp32_pass import Fp32Pass
from tpsample.screening.noise_bound import TileNoise
from tpsample.screening.pairs import pair_words


class FirstPass(Protocol):
    """What makes the approximate products."""

    def available(self) -> bool:
        """Return whether the bounds hold now."""

    def tile(self, rows: StepRows, start: int, stop: int) -> bound.Approximation:
        """Return approximate products of the weight rows from `start` to `stop`."""


@dataclass
class Tally:
    """What the screen has done since the sampler was built, or since somebody set it to zero.

    Attributes:
        screened, full: tiles of rows that it looked at, and that the definition computed whole.
        candidates: tokens that were computed one by one, over all rows and samples.
    """

    screened: int = 0
    full: int = 0
    candidates: int = 0


class ScreenedBackend(TorchBackend):
    """`TorchBackend` behind a first pass.

    Args:
        first_pass: of the same weight; default `Fp32Pass`.

    Attributes:
        tally: counts of tiles and candidates.
    """

    def __init__(
        self,
        weight: Tensor,
        shard: VocabShard,
        bias: Tensor | None,
        head: Head,
        *,
        rounds: int,
        first_pass: FirstPass | None = None,
    ) -> None:
        super().__init__(weight, shard, bias, head, rounds=rounds)
        self._first_pass = Fp32Pass(weight) if first_pass is None else first_pass
        self.tally = Tally()

    def best_words(
        self, step: Step, words: Tensor, part: int = 0, parts: int = 1, push: Push | None = None
    ) -> None:
        rows, stored = step.rows, step.batch.plan.stored_index
        num_stored = 0 if stored is None else len(stored)
        if 2 * num_stored > len(rows) or not self._first_pass.available():
            super().best_words(step, words, part, parts, push)
            return
        assert push is None, "plain PyTorch writes to no peer"
        best, tiles = words.view(step.noise.num_samples, len(rows)), self.tiles(len(rows), part, parts)
        if stored is None:
            for start, stop in tiles:
                self._screened_tile(rows, start, stop, best)
            return
        is_stored = torch.zeros(len(rows), dtype=torch.bool, device=words.device)
        is_stored[stored] = True
        other = (~is_stored).nonzero().squeeze(1)
        stored_rows, other_rows = rows.select(stored), rows.select(other)
        stored_best, other_best = best[:, stored], best[:, other]
        every = torch.arange(num_stored, device=words.device)
        for start, stop in tiles:
            self.full_tile(stored_rows, start, stop, stored_best, step.logits, every)
            self._screened_tile(other_rows, start, stop, other_best)
        best[:, stored], best[:, other] = stored_best, other_best

    def _screened_tile(self, rows: StepRows, start: int, stop: int, best: Tensor) -> None:
        """Raise `best`, int64 [num_samples, B], to the best words of a tile."""
        self.tally.screened += len(rows)
        first_id, num_ids = self._shard.start + start, stop - start
        bias = None if self._bias is None else self._bias[start:stop]
        approximation = self._first_pass.tile(rows, start, stop)
        slack = bound.of_scores(approximation, rows, self._head, bias, first_id)
        logits = head_logits(approximation.product, bias, self._head)
        if rows.controls is not None:
            logits = rows.controls.apply(logits, first_id)
        slack_of_scores, random = slack.of(approximation.error), rows.noise.random
        undecided, draws = ~slack.proved, bool(random.any())
        for sample, best_of in enumerate(best):
            noise = None
            if draws:
                stream, rounds = rows.noise.streams[sample], rows.noise.rounds
                noise = TileNoise(stream, first_id, num_ids, rounds)
            upper = UpperScores(logits, rows.noise.scale, slack_of_scores, noise, random)
            highest = upper.highest()
            self._compute(highest, noise, rows, start, stop, best_of)
            found = upper.at_least(word.value_of(best_of))
            found = found.keep(found.columns != highest.columns[found.rows])
            too_many = torch.bincount(found.rows, minlength=len(rows)) > limit(num_ids)
            self._compute(found.keep(~too_many[found.rows]), noise, rows, start, stop, best_of)
            undecided |= too_many
        if undecided.any():
            index = undecided.nonzero().squeeze(1)
            full_best = best[:, index]
            self.tally.full += len(index)
            self.full_tile(rows.select(index), start, stop, full_best)
            best[:, index] = full_best

    def _compute(
        self,
        pairs: Pairs,
        noise: TileNoise | None,
        rows: StepRows,
        start: int,
        stop: int,
        best: Tensor,
    ) -> None:
        """Raise `best`, int64 [B], to the words of some pairs of a tile."""
        if len(pairs.rows) == 0:
            return
        self.tally.candidates += len(pairs.rows)
        values = torch.zeros(len(pairs.rows)) if noise is None else noise.exact(*pairs)
        weight = self._weight[start:stop]
        bias = None if self._bias is None else self._bias[start:stop]
        first_id = self._shard.start + start
        words = pair_words(pairs, values, rows, weight, bias, self._head, first_id)
        best.scatter_reduce_(0, pairs.rows, words, "amax")
