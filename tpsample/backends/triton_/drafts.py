"""Draws of a drafter from its logits as one Triton launch."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.triton_.kernels.drafts import draft_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.passes import BLOCK, NUM_WARPS
from tpsample.core.row_noise import RowNoise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score words, int64 [1, B]. Twin: `tpsample.backends.torch_.drafts`."""
    (num_rows, width), lead = logits.shape, first_id % 4
    words = noise.seed.new_zeros(1, num_rows)
    if width:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        launch_kernel(
            draft_kernel,
            (num_rows, -(-(lead + width) // BLOCK)),
            logits_ptr=logits,
            stride_logits=logits.stride(0),
            seed_ptr=noise.seed,
            position_ptr=noise.positions,
            temperature_ptr=noise.temperature,
            words_ptr=words,
            sample=sample,
            vocab_start=first_id,
            lead=lead,
            width=width,
            DOMAIN=domain,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return words
