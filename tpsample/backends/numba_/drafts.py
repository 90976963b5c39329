"""Draws of a drafter from its logits in a native kernel."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.numba_.kernels import drafts as kernels
from tpsample.backends.numba_.kernels.arrays import arrays_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.core.row_noise import RowNoise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score words, int64 [1, B]. Twin: `tpsample.backends.torch_.drafts`."""
    words = noise.seed.new_zeros(1, len(logits))
    rows = tuple(arrays_of((noise.temperature, noise.seed, noise.positions)))
    given = logits.float(), first_id, rows, sample, domain, words[0]
    parts = max(1, min(len(logits), threads_for(16 * logits.numel())))
    in_ranges(kernels.draft_words, 0, len(logits), parts, *arrays_of(given))
    return words
