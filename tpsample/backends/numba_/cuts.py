"""Where the kept sets of stored rows end, in native kernels; see `backends.torch_.cuts`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, from_numpy

from tpsample.backends.numba_.kernels import cuts as kernels
from tpsample.backends.numba_.kernels.arrays import NONE, array_of, arrays_of
from tpsample.backends.numba_.kernels.threads import in_ranges
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.torch_.cuts import Cuts, EmptyDigits, SetSizes
from tpsample.backends.torch_.logprobs import log_totals
from tpsample.core import word
from tpsample.core.order import BINS, DIGITS, Search, tokens_per_mass

NO_SHARE = NONE.astype(np.float64)
NO_MASSES = np.empty((0, BINS), np.float32)


@dataclass(frozen=True)
class NativeCuts(Cuts):
    """`Cuts` on a CPU with Numba."""

    rows: NativeShardLogits

    def words_from(self, cut: Tensor, count: int) -> Tensor:
        words = np.zeros((len(self.rows.logits), count), np.int64)
        if count:
            self.rows.run(kernels.words_from, cut, words)
        return from_numpy(words)

    def digits(
        self,
        search: Search,
        before: Tensor | None,
        shift: int,
        share: Tensor | None = None,
        empty: EmptyDigits | None = None,
        *,
        mass: bool,
        least: Tensor | None = None,
    ) -> tuple[Search, Tensor]:
        search = search if before is None else self.next_digit(search, before, share)
        prefix, bins = search.prefix, np.zeros((len(search.prefix), DIGITS), np.int64)
        lowest = np.zeros(len(bins), np.int64) if least is None else least
        self.rows.run(kernels.digits, self.rows.largest, prefix, lowest, shift, mass, bins)
        return search, from_numpy(bins if mass else bins.astype(np.int32))

    def nth_equal(self, logit: Tensor, number: Tensor) -> Tensor:
        token = np.zeros(len(number), np.int64)
        self.rows.run(kernels.nth_equal, logit.flatten(), number, token)
        return from_numpy(token)

    def sums_of_bins(self, cut: Tensor | None) -> Tensor:
        sums = np.zeros((len(self.rows.logits), BINS + (cut is not None)), np.int64)
        self.rows.run(kernels.sums_of_bins, self.rows.largest, NONE if cut is None else cut, sums)
        return from_numpy(sums.astype(np.int32) if cut is None else sums)

    def list_end(
        self, bins: Tensor, total: Tensor, share: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        rows, (cut, room) = self.rows, np.empty((2, len(bins)), np.int64)
        given = arrays_of((bins, total, share, tokens_per_mass(bins.device)))
        of_rows = arrays_of((rows.largest, rows.noise.temperature))
        kernels.list_ends(*given, number, *of_rows, cut, room)
        return from_numpy(cut), from_numpy(room)

    def words_in_bin(
        self, bins: Tensor, limit: Tensor, share: Tensor | None = None, *, mass: bool
    ) -> Tensor:
        words, shares = np.empty(len(bins), np.int64), NO_SHARE if share is None else share
        per_mass = tokens_per_mass(bins.device) if mass else NO_MASSES
        kernels.words_in_bin(*arrays_of((bins.long(), limit, shares, per_mass)), words)
        return from_numpy(words)

    def search_bins(
        self, bins: Tensor, limit: Tensor, count: int, share: Tensor | None = None
    ) -> tuple[Search, Tensor]:
        rows = len(bins)
        search, words = np.empty((3, rows), np.int64), np.zeros((rows, 1 + count), np.int64)
        shares = NO_SHARE if share is None else share
        given = self.rows.largest, bins.long(), limit, shares
        self.rows.run(kernels.search_bins, *given, search, words)
        return Search(*map(from_numpy, search)), from_numpy(words)

    def cut_of(
        self,
        search: Search,
        listed: Tensor,
        keep_ties: Tensor,
        *,
        mass: bool,
        least: Tensor | None = None,
        of_greedy: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, cut = self.rows, np.empty(len(keep_ties), np.int64)
        left = np.empty(len(cut), np.bool_)
        given = *arrays_of((listed, tuple(arrays_of(search[1:])), keep_ties)), mass
        of_rows = tuple(arrays_of((rows.largest, rows.temperature, rows.noise.temperature)))
        ends = tuple(arrays_of(NONE if end is None else end for end in (least, of_greedy)))
        kernels.cuts_of_bins(*given, of_rows, ends, cut, left)
        return from_numpy(cut), from_numpy(left)

    def set_sizes(self, gathered: Tensor, cut: Tensor, cap: int, drawn: Tensor) -> SetSizes:
        sizes, mass, ends = (torch.empty_like(cut) for _ in range(3))
        whole, overflow = torch.empty_like(drawn), torch.empty_like(drawn)
        offsets, needed = cut.new_empty(len(cut) + 1), cut.new_zeros(3)
        given = arrays_of((gathered, cut, self.rows.noise.temperature, drawn))
        found = SetSizes(sizes, whole, overflow, offsets, mass, ends, needed)
        kernels.set_sizes(*given, cap, self.rows.vocab_size, *map(array_of, found))
        return found

    def listed_sets(self, words: Tensor, sets: SetSizes, total: int) -> tuple[Tensor, Tensor]:
        ids = words.new_full((total,), word.NO_TOKEN)
        log_masses = torch.full_like(ids, torch.nan, dtype=torch.float64)
        numbers = self.rows.temperature, self.rows.largest, log_totals(sets.mass)
        given = words, sets.cut, *numbers, sets.offsets, ids, log_masses
        in_ranges(kernels.listed_sets, 0, len(words), 1, *arrays_of(given))
        return ids, log_masses
