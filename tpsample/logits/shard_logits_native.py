"""The passes over stored logits in native kernels; see `tpsample.logits.shard_logits`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import DIGITS
from tpsample.logits.shard_logits import ShardLogits
from tpsample.native import passes
from tpsample.native.noise import row_noise
from tpsample.native.threads import in_ranges, threads_for
from tpsample.request.filters import RowFilters

NONE = np.empty(0, np.int64)


class NativeShardLogits(ShardLogits):
    """`ShardLogits` on a CPU with Numba."""

    def run(self, kernel: Any, *arguments: Any) -> None:
        """Call a pass for ranges of the rows, one per thread."""
        done = np.empty(0, np.bool_) if self.done is None else self.done.numpy()
        logits = self.logits.contiguous().numpy()
        temperature = self.temperature.contiguous().numpy()
        stored = passes.Stored(logits, self.first_id, temperature, done)
        threads = min(len(logits), threads_for(16 * logits.size)) or 1
        in_ranges(
            kernel, None, 0, len(logits), threads, lambda *row: (stored, *row[:2], *arguments)
        )

    def first_words(self, count: int) -> Tensor:
        first = torch.zeros(len(self.logits), count, dtype=torch.int64)
        if count:
            self.run(passes.first_words, count, first.numpy())
        return first

    def best_scores(self, count: int) -> Tensor:
        scores = self._scores(NONE, count)
        orders = self.words_of(word.token_of(scores).flatten(1)).view_as(scores) * (scores > 0)
        return torch.cat([self.first_words(1), scores.flatten(1), orders.flatten(1)], dim=1)

    def before(self, gathered: Tensor, filters: RowFilters, count: int) -> Tensor:
        top = word.value_of(gathered[:, :, 0].amax(dim=0))
        marks = self._marks(gathered, filters, count)
        sums = marks.new_zeros(len(marks), 2 * marks.shape[1] + 1)
        log_min_p = filters.total_log_min_p.contiguous().numpy()
        self.run(passes.before, top.numpy(), marks.contiguous().numpy(), log_min_p, sums.numpy())
        return sums

    def digits(self, prefix: Tensor, shift: int, *, mass: bool) -> Tensor:
        bins = torch.zeros(len(prefix), DIGITS, dtype=torch.int64)
        self.run(passes.digits, self._tops, prefix.numpy(), shift, mass, bins.numpy())
        return bins if mass else bins.to(torch.int32)

    def best_kept(self, cut: Tensor) -> Tensor:
        return self._scores(cut.contiguous().numpy(), 1).squeeze(2)

    def mass_from(self, cut: Tensor) -> Tensor:
        sums = torch.zeros(len(cut), 2, dtype=torch.int64)
        self.run(passes.mass_from, self._tops, cut.contiguous().numpy(), sums.numpy())
        return sums

    def count_from(self, marks: Tensor) -> Tensor:
        counts = torch.zeros_like(marks, memory_format=torch.contiguous_format)
        self.run(passes.count_from, marks.contiguous().numpy(), counts.numpy())
        return counts

    @property
    def _tops(self) -> np.ndarray:
        assert self.top is not None
        return self.top.contiguous().numpy()

    def _scores(self, cut: np.ndarray, count: int) -> Tensor:
        """Return int64 [F, samples, count], the best score words of what reaches a cut."""
        rows, noise = len(self.logits), self.noise
        index, samples = np.arange(rows), noise.num_samples
        scale, random = np.empty((2, rows), np.float32)
        streams = np.empty((samples, rows, 3), np.uint32)
        row_noise(
            noise.temperature.contiguous().numpy(),
            noise.seed.contiguous().numpy(),
            noise.positions.contiguous().numpy(),
            index,
            samples,
            scale,
            random,
            streams,
        )
        found = torch.zeros(rows, samples, count, dtype=torch.int64)
        of_rows = scale, random, streams, noise.rounds, cut, count, found.numpy()
        self.run(passes.best_scores, *of_rows)
        return found
