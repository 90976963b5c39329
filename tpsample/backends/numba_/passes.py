"""The passes over stored logits in native kernels; see `tpsample.backends.torch_.passes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy

from tpsample.backends.numba_.kernels import ends, passes
from tpsample.backends.numba_.kernels.arrays import NONE, array_of, arrays_of
from tpsample.backends.numba_.kernels.best_scores import first_kept, known_best
from tpsample.backends.numba_.kernels.draw import draw_given
from tpsample.backends.numba_.kernels.head import NativeHead
from tpsample.backends.numba_.kernels.inputs import weight_of
from tpsample.backends.numba_.kernels.logprobs import list_words, told_logprobs
from tpsample.backends.numba_.kernels.noise import draws_of, safe_temperatures
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.backends.torch_.logprobs import ListedWords, log_totals
from tpsample.backends.torch_.passes import SetOfFirst, ShardLogits, Verdict
from tpsample.core import word
from tpsample.core.order import ABOVE_ALL
from tpsample.core.row_noise import RowNoise
from tpsample.output import Logprobs
from tpsample.request.filters import LogprobRows, Thresholds

NOT_LISTED = np.empty((0, 0, 0), np.int64)


class NativeShardLogits(ShardLogits):
    """`ShardLogits` on a CPU with Numba."""

    backend = "numba"

    @staticmethod
    def temperature_of(noise: RowNoise) -> Tensor:
        given = array_of(noise.temperature.contiguous())
        safe = np.empty_like(given)
        safe_temperatures(given, safe)
        return from_numpy(safe)

    def run(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Call a pass for ranges of the rows that are not done, one per thread.

        Args:
            arguments: of the pass; tensors that it writes lie in order.
        """
        stored = self._stored
        in_ranges(kernel, 0, len(stored.rows), self._threads, stored, *arrays_of(arguments))

    def first_words(self, count: int) -> Tensor:
        return self._own_words(count, np.empty((self.logits.shape[0], 0), np.int64))

    def words_of(self, token_ids: Tensor) -> Tensor:
        return self._own_words(0, array_of(token_ids.contiguous()))

    def own_words(self, count: int, token_ids: Tensor, first: Tensor | None = None) -> Tensor:
        if first is not None:
            return super().own_words(count, token_ids, first)
        return self._own_words(count, array_of(token_ids.contiguous()))

    def _own_words(self, count: int, token_ids: np.ndarray) -> Tensor:
        """Return what `own_words` does of rows whose first words are not known."""
        listed = NOT_LISTED if self.found is None else self.found.first
        out = np.zeros((len(token_ids), count + token_ids.shape[1]), np.int64)
        self.run(passes.own_words, listed, token_ids, out)
        return from_numpy(out)

    def best_scores(self, count: int) -> Tensor:
        rows, best = self._stored.rows, self.noise.num_samples * count
        out = np.zeros((self.logits.shape[0], 1 + 2 * best), np.int64)
        if self.rough is not None:  # what its rows store has other scores
            *known, bound = arrays_of(self.rough[:3])
            if known_best(*known, bound, *self._stored[:2], count, out) == len(out):
                return from_numpy(out)
            rows = rows[bound[rows] == 0]
        if len(rows):
            scores = self._scores(rows, NONE, count).reshape(len(out), best)
            ids = np.where(scores > 0, word.TOKEN_MASK - (scores & word.TOKEN_MASK), word.NO_TOKEN)
            found = self._own_words(1, ids).numpy()  # first words, then those of the ids
            out[rows] = np.concatenate([found[:, :1], scores, found[:, 1:]], axis=1)[rows]
        return from_numpy(out)

    def before(self, best: Tensor, thresholds: Thresholds, count: int) -> Tensor:
        top = self.top_of(best.unsqueeze(0))[1]
        if self.rough is not None:
            rows, numbers = best.shape
            sums = np.zeros((rows, 4 if thresholds.counts else 2, 1 + numbers // 2), np.int64)
            given = self.rough.error_bound, top, best, thresholds.least_of_total, count
            self.run(ends.bound_best, *given, sums)
            return from_numpy(sums.reshape(rows, -1))
        marks = self._marks(best, thresholds, count) + 1  # only greater words come before
        sums = np.zeros((len(marks), 2 * marks.shape[1] + 1), np.int64)
        self.run(passes.weigh, top, marks, thresholds.least_of_total, sums)
        return from_numpy(sums)

    def totals(self, cut: Tensor) -> Tensor:
        if self.rough is None:
            return super().totals(cut)
        no_best, sums = np.zeros((len(cut), 1), np.int64), np.zeros((len(cut), 2, 1), np.int64)
        given = self.rough.error_bound, self.largest, no_best, cut, 1
        self.run(ends.bound_best, *given, sums)
        return from_numpy(sums[:, :, 0])

    def top_of(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        rows = gathered.shape[1]
        words, top = np.empty(rows, np.int64), np.empty(rows, np.float32)
        passes.tops_of(array_of(gathered.contiguous()), words, top)
        return from_numpy(words), from_numpy(top)

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        least = np.empty(y.shape[0], np.int64)
        passes.least_words(*arrays_of((self.largest, temperature, y)), least)
        return from_numpy(least)

    def first_kept(self, best: Tensor, sums: Tensor, thresholds: Thresholds, count: int) -> Verdict:
        rows = best.shape[0]
        words = np.empty((rows, self.noise.num_samples), np.int64)
        decided, top = np.empty(rows, np.bool_), np.empty(rows, np.float32)
        limits, bounded = tuple(arrays_of(thresholds[:3])), self.rough is not None
        given = *arrays_of((best, sums)), count, self._stored.temperature, limits, bounded
        first_kept(*given, words, decided, top)
        return Verdict(from_numpy(words), from_numpy(decided), from_numpy(top))

    def best_of_first(self, first: Tensor, thresholds: Thresholds) -> Tensor:
        return self._set_of_first(first, thresholds)[0]

    def set_of_first(self, first: Tensor, thresholds: Thresholds) -> SetOfFirst:
        words, drawn, held, top, last = self._set_of_first(first, thresholds)
        cut = replace(self, top=top).last_cut(last, of_greedy=first[:, 0])
        return SetOfFirst(words, cut, held, top, drawn)

    def _set_of_first(self, first: Tensor, thresholds: Thresholds) -> tuple[Tensor, ...]:
        """Return what the kernel of that name finds."""
        shape = first.shape[0], self.noise.num_samples
        words, drawn = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        held, top = np.zeros((shape[0], 2), np.int64), np.empty(shape[0], np.float32)
        last, total = np.empty(shape[0], np.int64), thresholds.total
        limits = tuple(arrays_of((*thresholds[:4], NONE if total is None else total)))
        rows = array_of(first.contiguous()), self._stored.temperature, limits, draws_of(self.noise)
        found = words, drawn, held, top, last
        in_ranges(passes.set_of_first, 0, shape[0], 1, *rows, *found)
        return tuple(map(from_numpy, found))

    def last_cut(self, least: Tensor, *, of_greedy: Tensor | None = None) -> Tensor:
        cut, other = np.empty(least.shape[0], np.int64), NONE if of_greedy is None else of_greedy
        given = self.largest, self.noise.temperature, least, other
        passes.last_cuts(*arrays_of(given), cut)
        return from_numpy(cut)

    def logprobs_of_words(
        self,
        logprob_rows: LogprobRows,
        sampled: Tensor,
        words: ListedWords,
        cut: Tensor | None,
        sums: Tensor,
    ) -> Logprobs:
        asked = sampled, logprob_rows.chosen, logprob_rows.top_of, logprob_rows.as_logits
        rows, width = sums.shape[0], logprob_rows.top + words.own.shape[1]
        # The caller gets these, and may resize them.
        token_ids, ranks = (sampled.new_empty(rows, width) for _ in range(2))
        log_total = log_totals(sums[:, 0])
        values, entropies = log_total.new_empty(rows, width), torch.empty_like(log_total)
        cuts = np.zeros(rows, np.int64) if cut is None else cut
        told = cuts, sums, log_total, self.vocab_size
        own, given = (tuple(arrays_of(its)) for its in (words[:4], asked))
        found = token_ids, values, ranks, entropies
        told_logprobs(own, given, *arrays_of(told), *map(array_of, found))
        return Logprobs(token_ids, values, ranks, entropies)

    def best_kept(self, cut: Tensor) -> Tensor:
        rows, shape = self._stored.rows, (self.logits.shape[0], self.noise.num_samples)
        best = np.zeros(shape, np.int64)
        if self.rough is not None:  # their words are known, and of all tokens
            words, error_bound = arrays_of((self.rough.best, self.rough.error_bound))
            known = np.flatnonzero(error_bound)
            best[known] = words[:, known].max(axis=(0, 3))
            rows = rows[error_bound[rows] == 0]
        if len(rows):
            best[rows] = self._scores(rows, array_of(cut.contiguous()), 1)[rows, :, 0]
        best[np.isnan(array_of(self.largest))] = word.KEY_NAN << word.TOKEN_BITS
        return self.of_undone(from_numpy(best))

    def mass_from(self, cut: Tensor) -> Tensor:
        return self.held_from(cut)[:, 0]

    def held_from(self, cut: Tensor) -> Tensor:
        sums, none = np.zeros((len(cut), 3), np.int64), np.full(len(cut), ABOVE_ALL)
        rows = self
        if self.rough is not None:  # a set of all tokens is only counted
            cuts, error_bound = arrays_of((cut, self.rough.error_bound))
            is_whole = (cuts == word.LOWEST_DRAWABLE) & (error_bound > 0)
            for row in np.flatnonzero(is_whole):
                sums[row, 1] = np.count_nonzero(self._stored.logits[row] > -np.inf)
            rows = self.without(from_numpy(is_whole))
        rows.run(passes.weigh, self.largest, cut.unsqueeze(1), none, sums)
        return from_numpy(sums[:, :2])

    def weigh(self, cut: Tensor | None, marks: Tensor | None = None) -> Tensor:
        rows = len(self.logits)
        counted = np.empty((rows, 0), np.int64) if marks is None else marks
        sums = np.zeros((rows, 2 + counted.shape[1]), np.int64)
        cuts = np.zeros(rows, np.int64) if cut is None else cut
        self.run(passes.moment_from, self.largest, cuts, counted, sums)
        return from_numpy(sums)

    def listed_words(self, logprob_rows: LogprobRows, gathered: Tensor) -> ListedWords:
        (_, rows, width), count = gathered.shape, max(1, logprob_rows.top)
        first, own = np.zeros((rows, count), np.int64), np.empty((rows, width - count), np.int64)
        marks = np.empty((rows, width - count + 1), np.int64)
        top, temperature = (np.empty(rows, np.float32) for _ in range(2))
        given = gathered, self.temperature, logprob_rows.processed
        list_words(*arrays_of(given), first, own, marks, top, temperature)
        return ListedWords(*map(from_numpy, (first, own, top, temperature, marks)))

    def least_of_mass(self, limit: Tensor) -> Tensor:
        least = torch.full_like(limit, ABOVE_ALL, memory_format=torch.contiguous_format)
        self.run(passes.least_of_mass, self.largest, limit, least)
        return least

    def spread(self) -> Tensor:
        sums = np.zeros((len(self.largest), 4), np.int64)
        self.run(passes.spread, self.largest, sums)
        return from_numpy(sums)

    def _scores(self, rows: np.ndarray, cut: np.ndarray, count: int) -> np.ndarray:
        """Return int64 [F, samples, count], the best score words of what reaches a cut, of rows
        that store logits; 0 in the others."""
        words = np.zeros((len(self.logits), self.noise.num_samples, count), np.int64)
        source = weight_of(self.logits.contiguous(), self.first_id, 0, self.logits.shape[1])
        draws, cuts, best = draws_of(self.noise), cut[rows] if len(cut) else cut, words[rows]
        given = source, rows, rows, draws, NativeHead(), cuts, True, best[np.newaxis]
        in_ranges(draw_given, 0, len(rows), self._threads, *given)
        words[rows] = best
        words[..., ::-1].sort(axis=-1)
        return words

    @cached_property
    def _stored(self) -> passes.Stored:
        """The logits as the passes take them, and the rows that are not done."""
        if self.done is None:
            rows = np.arange(self.logits.shape[0])
        else:
            rows = np.flatnonzero(~array_of(self.done))
        logits, temperature = arrays_of((self.logits, self.temperature))
        return passes.Stored(logits, self.first_id, temperature, rows)

    @cached_property
    def _threads(self) -> int:
        """The threads among which the rows of `_stored` are worth sharing."""
        num_rows = len(self._stored.rows)
        return max(1, min(num_rows, threads_for(16 * num_rows * self.logits.shape[1])))
