"""Draws of a drafter from its logits in a native kernel."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpsample.backends.numba_.kernels.arrays import NONE, array_of
from tpsample.backends.numba_.kernels.draw import draw_given
from tpsample.backends.numba_.kernels.head import NativeHead
from tpsample.backends.numba_.kernels.inputs import weight_of
from tpsample.backends.numba_.kernels.noise import draws_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.core.row_noise import RowNoise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score words, int64 [1, B]. Twin: `tpsample.backends.torch_.drafts`."""
    words, rows = noise.seed.new_zeros(1, len(logits)), np.arange(len(logits))
    source = weight_of(logits.contiguous(), first_id, 0, logits.shape[1])
    draws = draws_of(noise)._replace(samples=1, first_sample=sample, domain=domain)
    best = array_of(words.view(1, len(rows), 1, 1))
    parts = max(1, min(len(rows), threads_for(16 * logits.numel())))
    given = source, rows, rows, draws, NativeHead(), NONE, True, best
    in_ranges(draw_given, 0, len(rows), parts, *given)
    return words
