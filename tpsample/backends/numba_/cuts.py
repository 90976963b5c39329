"""Where the kept sets of stored rows end, in native kernels; see `backends.torch_.cuts`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpsample.backends.numba_.kernels import cuts as kernels
from tpsample.backends.numba_.kernels.arrays import arrays_of
from tpsample.backends.numba_.kernels.threads import in_ranges
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.torch_.cuts import Cuts, EmptyDigits, SetSizes
from tpsample.backends.torch_.logprobs import log_totals
from tpsample.core import word
from tpsample.core.order import BINS, DIGITS, Search, mass_limit, tokens_per_mass


@dataclass(frozen=True)
class NativeCuts(Cuts):
    """`Cuts` on a CPU with Numba."""

    rows: NativeShardLogits

    def words_from(self, cut: Tensor, count: int) -> Tensor:
        words = np.zeros((len(self.rows.logits), count), np.int64)
        if count:
            self.rows.run(kernels.words_from, cut, words)
        return torch.from_numpy(words)

    def digits(
        self,
        prefix: Tensor,
        shift: int,
        empty: EmptyDigits | None = None,
        *,
        mass: bool,
        least: Tensor | None = None,
    ) -> Tensor:
        bins = torch.zeros(len(prefix), DIGITS, dtype=torch.int64, device="cpu")
        least = torch.zeros_like(prefix) if least is None else least
        self.rows.run(kernels.digits, self.rows.largest, prefix, least, shift, mass, bins)
        return bins if mass else bins.to(torch.int32)

    def nth_equal(self, logit: Tensor, number: Tensor) -> Tensor:
        token = torch.zeros_like(number)
        self.rows.run(kernels.nth_equal, logit.flatten(), number, token)
        return token

    def numbers_of_bins(self) -> Tensor:
        numbers = torch.zeros(len(self.rows.logits), BINS, dtype=torch.int64, device="cpu")
        self.rows.run(kernels.numbers_of_bins, self.rows.largest, numbers)
        return numbers.to(torch.int32)

    def masses_of_bins(self, cut: Tensor) -> Tensor:
        masses = cut.new_zeros(len(cut), BINS + 1)
        self.rows.run(kernels.masses_of_bins, self.rows.largest, cut, masses)
        return masses

    def last_bins(
        self, bins: Tensor, total: Tensor, share: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        out, limit = bins.new_zeros(2, len(bins)), mass_limit(total, share)
        arguments = bins, limit, tokens_per_mass(bins.device), out, number
        in_ranges(kernels.last_bins, 0, len(bins), 1, *arrays_of(arguments))
        return out[0], out[1]

    def words_of_bin(self, bins: Tensor, count: int) -> Tensor:
        words = bins.new_zeros(len(bins), 1 + count)
        self.rows.run(kernels.words_of_bin, self.rows.largest, bins, words)
        return words

    def reached_at(self, search: Search, words: Tensor, *, mass: bool) -> Tensor:
        cut = torch.empty_like(search.limit)
        given = words, self.rows.temperature, self.rows.largest, search.reached, search.limit
        in_ranges(kernels.reached_at, 0, len(words), 1, *arrays_of((*given, mass, cut)))
        return cut

    def listed_sets(self, words: Tensor, sets: SetSizes, total: int) -> tuple[Tensor, Tensor]:
        ids = words.new_full((total,), word.NO_TOKEN)
        log_masses = torch.full_like(ids, torch.nan, dtype=torch.float64)
        numbers = self.rows.temperature, self.rows.largest, log_totals(sets.mass)
        given = words, sets.cut, *numbers, sets.offsets, ids, log_masses
        in_ranges(kernels.listed_sets, 0, len(words), 1, *arrays_of(given))
        return ids, log_masses
