"""Draws of a drafter from its logits in a native kernel."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.numba_.kernels import drafts as kernels
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.threads import in_ranges, threads_for
from tpsample.core.row_noise import RowNoise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score words, int64 [1, B]. Twin: `tpsample.backends.torch_.drafts`."""
    words = noise.seed.new_zeros(1, len(logits))
    tensors = noise.temperature, noise.seed, noise.positions
    rows = tuple(array_of(tensor.contiguous()) for tensor in tensors)
    args = array_of(logits.float().contiguous()), first_id, rows, sample, domain, array_of(words[0])
    parts = max(1, min(len(logits), threads_for(16 * logits.numel())))
    in_ranges(kernels.draft_words, 0, len(logits), parts, *args)
    return words
