"""Draws of a drafter from its logits in a native kernel."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpsample.backends.numba_.kernels.arrays import NONE, array_of
from tpsample.backends.numba_.kernels.draw import draw_stored
from tpsample.backends.numba_.kernels.head import NativeHead
from tpsample.backends.numba_.kernels.inputs import weight_of
from tpsample.backends.numba_.kernels.noise import draws_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.core.row_noise import RowNoise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score words, int64 [1, B]. Twin: `tpsample.backends.torch_.drafts`."""
    rows, words = len(logits), noise.seed.new_zeros(1, len(logits))
    given = weight_of(logits.float().contiguous(), first_id, 0, logits.shape[1])
    draws = draws_of(noise)._replace(samples=1, first_sample=sample, domain=domain)
    best = array_of(words.view(rows, 1, 1))
    parts = max(1, min(rows, threads_for(16 * logits.numel())))
    in_ranges(draw_stored, 0, rows, parts, given, np.arange(rows), draws, NativeHead(), NONE, best)
    return words
