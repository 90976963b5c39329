"""The passes over stored logits in native kernels; see `tpsample.backends.torch_.passes`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsample.backends.numba_.kernels import ends, passes
from tpsample.backends.numba_.kernels.arrays import array_of, arrays_of
from tpsample.backends.numba_.kernels.best_scores import first_kept, known_best
from tpsample.backends.numba_.kernels.draw import draw_stored
from tpsample.backends.numba_.kernels.head import NativeHead
from tpsample.backends.numba_.kernels.inputs import weight_of
from tpsample.backends.numba_.kernels.logprobs import list_words, told_logprobs
from tpsample.backends.numba_.kernels.noise import draws_of, safe_temperatures
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.backends.torch_.logprobs import ListedWords, log_totals
from tpsample.backends.torch_.passes import ShardLogits, Verdict, or_nan
from tpsample.core import word
from tpsample.core.order import ABOVE_ALL
from tpsample.core.row_noise import RowNoise
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows, Thresholds

NONE, NO_BOUND = np.empty(0, np.int64), np.empty(0, np.float32)
NO_IDS = torch.empty(1, 0, dtype=torch.int64, device="cpu")
NOT_LISTED = np.empty((0, 0, 0), np.int64)


class NativeShardLogits(ShardLogits):
    """`ShardLogits` on a CPU with Numba."""

    backend = "numba"

    @staticmethod
    def temperature_of(noise: RowNoise) -> Tensor:
        safe = torch.empty_like(noise.temperature, memory_format=torch.contiguous_format)
        safe_temperatures(*arrays_of((noise.temperature, safe)))
        return safe

    def run(
        self, kernel: Callable[..., Any], *arguments: Any, rows: np.ndarray | None = None
    ) -> None:
        """Call a pass for ranges of the rows that are not done, or of these, one per thread.

        Args:
            arguments: of the pass; tensors that it writes lie in order.
        """
        rows = self._rows if rows is None else rows
        stored = passes.Stored(*arrays_of((self.logits, self.first_id, self.temperature, rows)))
        in_ranges(kernel, 0, len(rows), self._threads, stored, *arrays_of(arguments))

    def first_words(self, count: int) -> Tensor:
        return self._own_words(count, NO_IDS.expand(len(self.logits), 0))

    def words_of(self, token_ids: Tensor) -> Tensor:
        return self._own_words(0, token_ids)

    def own_words(self, count: int, token_ids: Tensor, first: Tensor | None = None) -> Tensor:
        if first is not None:
            return super().own_words(count, token_ids, first)
        return self._own_words(count, token_ids)

    def _own_words(self, count: int, token_ids: Tensor) -> Tensor:
        """Return what `own_words` does of rows whose first words are not known."""
        listed = NOT_LISTED if self.first is None else self.first
        error_bound = NO_BOUND if self.rough is None else self.rough.error_bound
        out = token_ids.new_zeros(len(token_ids), count + token_ids.shape[1])
        self.run(passes.own_words, listed, error_bound, token_ids, out)
        return out

    def best_scores(self, count: int) -> Tensor:
        best, rows = self.noise.num_samples * count, self._rows
        out = self.logits.new_zeros(len(self.logits), 1 + 2 * best, dtype=torch.int64)
        if self.rough is not None:  # what its rows store has other scores
            found = self.first, self.rough.best, self.rough.error_bound
            known_best(*arrays_of((*found, self.logits, self.first_id, count, out)))
            rows = rows[array_of(self.rough.error_bound)[rows] == 0]
        if len(rows):
            scores = self._scores(rows, NONE, count).flatten(1)
            orders = self.words_of(word.token_of(scores)) * (scores > 0)
            index = torch.from_numpy(rows)
            out[index] = torch.cat([self.first_words(1), scores, orders], dim=1)[index]
        return out

    def before(self, best: Tensor, thresholds: Thresholds, count: int) -> Tensor:
        if self.rough is not None:
            marks = 1 + best.shape[1] // 2
            sums = best.new_zeros(len(best), 4 if thresholds.counts else 2, marks)
            given = self.rough.error_bound, best, thresholds.least_of_total, count
            self.run(ends.bound_best, *given, sums)
            return sums.flatten(1)
        top = word.value_of(best[:, 0])
        marks = self._marks(best, thresholds, count) + 1  # only greater words come before
        sums = marks.new_zeros(len(marks), 2 * marks.shape[1] + 1)
        self.run(passes.weigh, top, marks, thresholds.least_of_total, sums)
        return sums

    def totals(self, cut: Tensor) -> Tensor:
        if self.rough is None:
            return super().totals(cut)
        sums = cut.new_zeros(len(cut), 2, 1)
        self.run(ends.bound_totals, self.rough.error_bound, self.largest, cut, sums)
        return sums.flatten(1)

    def top_of(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        words = gathered.new_empty(gathered.shape[1])
        top = gathered.new_empty(gathered.shape[1], dtype=torch.float32)
        passes.tops_of(*arrays_of((gathered, words, top)))
        return words, top

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        least = torch.empty_like(y, dtype=torch.int64, memory_format=torch.contiguous_format)
        passes.least_words(*arrays_of((self.largest, temperature, y, least)))
        return least

    def first_kept(self, best: Tensor, sums: Tensor, thresholds: Thresholds, count: int) -> Verdict:
        words = best.new_empty(len(best), self.noise.num_samples)
        decided = torch.empty(len(best), dtype=torch.bool, device="cpu")
        top = torch.empty(len(best), dtype=torch.float32, device="cpu")
        limits, bounded = tuple(arrays_of(thresholds[:3])), self.rough is not None
        given = best, sums, count, self.temperature, limits, bounded
        first_kept(*arrays_of((*given, words, decided, top)))
        return Verdict(words, decided, top)

    def best_of_first(self, first: Tensor, thresholds: Thresholds) -> Tensor:
        out = first.new_zeros(len(first), self.noise.num_samples)
        self._run_on_first(passes.best_of_first, first, thresholds, draws_of(self.noise), out)
        return out

    def kept_of_first(self, first: Tensor, thresholds: Thresholds) -> Tensor:
        out = first.new_zeros(len(first), 3)
        self._run_on_first(passes.kept_of_first, first, thresholds, out)
        return out

    def _run_on_first(
        self, kernel: Any, first: Tensor, thresholds: Thresholds, *arguments: Any
    ) -> None:
        """Call a pass over the first words of all rows."""
        total = thresholds.total
        limits = tuple(arrays_of((*thresholds[:4], NONE if total is None else total)))
        rows = first, self.temperature, limits
        in_ranges(kernel, 0, len(first), 1, *arrays_of((*rows, *arguments)))

    def logprobs_of_words(
        self,
        logprob_rows: LogprobRows,
        sampled: Tensor,
        words: ListedWords,
        cut: Tensor | None,
        sums: Tensor,
    ) -> Logprobs:
        asked = sampled, logprob_rows.chosen, logprob_rows.top_of, logprob_rows.as_logits
        shape = len(sums), logprob_rows.top + words.own.shape[1]
        token_ids, ranks = sampled.new_empty(shape), sampled.new_empty(shape)
        log_total = log_totals(sums[:, 0])
        values, entropies = log_total.new_empty(shape), torch.empty_like(log_total)
        cut = torch.zeros_like(sums[:, 0]) if cut is None else cut
        told = cut, sums, log_total, self.vocab_size, token_ids, values, ranks, entropies
        told_logprobs(*(tuple(arrays_of(its)) for its in (words[:4], asked)), *arrays_of(told))
        return Logprobs(token_ids, values, ranks, entropies)

    def best_kept(self, cut: Tensor) -> Tensor:
        best = self._scores(self._rows, array_of(cut.contiguous()), 1).squeeze(2)
        return self.of_undone(or_nan(best, self.largest))

    def mass_from(self, cut: Tensor) -> Tensor:
        return self.held_from(cut)[:, 0]

    def held_from(self, cut: Tensor) -> Tensor:
        sums, none = cut.new_zeros(len(cut), 3), torch.full_like(cut, ABOVE_ALL)
        self.run(passes.weigh, self.largest, cut.unsqueeze(1), none, sums)
        return sums[:, :2]

    def moment_from(self, cut: Tensor) -> Tensor:
        return self.weigh(cut, cut.new_empty(len(cut), 0))

    def weigh(self, cut: Tensor | None, marks: Tensor) -> Tensor:
        cut = marks.new_zeros(len(marks)) if cut is None else cut
        sums = marks.new_zeros(len(marks), 2 + marks.shape[1])
        self.run(passes.moment_from, self.largest, cut, marks, sums)
        return sums

    def listed_words(self, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
        (_, rows, width), count = gathered.shape, max(1, logprob_rows.top)
        first = gathered.new_zeros(rows, count)
        own = gathered.new_empty(rows, width - count)
        marks = gathered.new_empty(rows, width - count + 1)
        top, temperature = (torch.empty_like(self.temperature) for _ in range(2))
        given = gathered, self.temperature, logprob_rows.processed
        list_words(*arrays_of((*given, first, own, marks, top, temperature)))
        return ListedWords(first, own, top, temperature, marks)

    def least_of_mass(self, limit: Tensor) -> Tensor:
        least = torch.full_like(limit, ABOVE_ALL, memory_format=torch.contiguous_format)
        self.run(passes.least_of_mass, self.largest, limit, least)
        return least

    def spread(self) -> Tensor:
        sums = torch.zeros(len(self.largest), 4, dtype=torch.int64, device="cpu")
        self.run(passes.spread, self.largest, sums)
        return sums

    def _scores(self, rows: np.ndarray, cut: np.ndarray, count: int) -> Tensor:
        """Return int64 [F, samples, count], the best score words of what reaches a cut, of rows
        that store logits; 0 in the others."""
        words = np.zeros((len(self.logits), self.noise.num_samples, count), np.int64)
        source = weight_of(self.logits.contiguous(), self.first_id, 0, self.logits.shape[1])
        draws, cuts, best = draws_of(self.noise), cut[rows] if len(cut) else cut, words[rows]
        arguments = source, rows, draws, NativeHead(), cuts, best
        in_ranges(draw_stored, 0, len(rows), self._threads, *arguments)
        words[rows] = best
        return _descending(words)

    @cached_property
    def _rows(self) -> np.ndarray:
        """int64, the rows that are not done."""
        if self.done is None:
            return np.arange(len(self.logits))
        return np.flatnonzero(~array_of(self.done))

    @cached_property
    def _threads(self) -> int:
        """The threads among which `_rows` are worth sharing."""
        num_rows = len(self._rows)
        return max(1, min(num_rows, threads_for(16 * num_rows * self.logits.shape[1])))


def _descending(words: np.ndarray) -> Tensor:
    """Sort the last axis in place."""
    words[..., ::-1].sort(axis=-1)
    return torch.from_numpy(words)
