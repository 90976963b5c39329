"""Verification by ratio in native kernels; see `tpsample.backends.torch_.verification`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, from_numpy

from tpsample.backends.numba_.kernels import laws as kernels
from tpsample.backends.numba_.kernels.arrays import array_of, arrays_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.backends.torch_.verification import Laws, Places, Verification
from tpsample.output import VerifyOutput


class NativeVerification(Verification):
    """`Verification` on a CPU with Numba."""

    def laws(self, gathered: Tensor) -> Laws:
        shape = self.drafts.shape
        drafts, cut = np.empty(shape, np.int64), np.empty(shape, np.int64)
        top, draft_top = np.empty(shape, np.float32), np.empty(shape, np.float32)
        status = array_of(self.status.contiguous()).copy()
        given = arrays_of((gathered, self.drafts, self.rows.noise.temperature))
        kernels.find_laws(*given, drafts, status, top, draft_top, cut)
        return Laws(*map(from_numpy, (top, draft_top, cut, drafts, status)))

    def accept(self, laws: Laws, sums: Tensor) -> tuple[Laws, Places]:
        rows, width = self.drafts.shape
        count, drafts = width if self.block else 1, array_of(laws.drafts.contiguous()).copy()
        index, weights = np.empty((rows, count), np.int64), np.empty((2, rows, count), np.int64)
        coefficient = np.empty((rows, count))
        given = *arrays_of((sums, self.seed, self.positions)), self.block
        kernels.accept(drafts, *given, index, weights, coefficient)
        places = Places(from_numpy(index), from_numpy(weights), from_numpy(coefficient))
        return replace(laws, drafts=from_numpy(drafts)), places

    def output(self, laws: Laws, places: Places, gathered: Tensor) -> VerifyOutput:
        token_ids = torch.empty_like(self.drafts)  # the caller gets these, and may resize them
        accepted, status = torch.empty_like(self.seed), torch.empty_like(self.status[:, 0])
        of_laws, of_places = (
            tuple(arrays_of(its))
            for its in ((laws.drafts, laws.status), (places.index, places.coefficient))
        )
        words, sampled, *at = arrays_of((gathered, self.sampled, self.seed, self.positions))
        out = map(array_of, (token_ids, accepted, status))
        kernels.emit(words, of_laws, sampled, of_places, *at, *out)
        return VerifyOutput(accepted, token_ids, status, self.seed)

    def sums(self, laws: Laws) -> Tensor:
        sums = self.drafts.new_zeros(2 if self.draft is None else 4, self.drafts.numel())
        self._run(kernels.law_sums, laws, self.drafts.numel(), sums)
        return sums.view(-1, *self.drafts.shape)

    def residuals(self, laws: Laws, places: Places) -> Tensor:
        index = places.index
        out = index.new_zeros(2, *index.shape)
        given = index, places.weights, self.seed, self.positions, out
        self._run(kernels.residuals, laws, index.numel(), *given)
        return out if self.block else out[:1]

    def _run(self, kernel: object, laws: Laws, count: int, *tensors: Tensor) -> None:
        """Call a kernel for ranges of `count` positions, one per thread."""
        logits, first_id, width = self.rows.logits, self.rows.first_id, self.drafts.shape[1]
        numbers = self.rows.temperature, laws.top, laws.draft_top, laws.cut, laws.drafts
        given = logits, self.draft_logits, self.draft is None, first_id, width
        rows = kernels.NativeLaws(*arrays_of((*given, *(each.flatten() for each in numbers))))
        parts = max(1, min(count, threads_for(32 * count * logits.shape[1])))
        in_ranges(kernel, 0, count, parts, rows, *arrays_of(tensors))
