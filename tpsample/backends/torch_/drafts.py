"""Draws of a drafter from its logits on this rank, in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.torch_.passes import tile_elements
from tpsample.core.order import order_words
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import score
from tpsample.noise import row_stream, tile_noise


def draft_words(logits: Tensor, first_id: int, noise: RowNoise, sample: int, domain: int) -> Tensor:
    """Return the best score word of each row on this rank, int64 [1, B]; 0 without a token.

    Args:
        logits: [B, V_local], of any floating dtype.
        first_id: global id of the first column.
        noise: temperature, seed and position of the rows.
        sample, domain: words of the counter of the rows' streams.
    """
    seed, positions = noise.seed.unsqueeze(1), noise.positions.unsqueeze(1)
    streams = row_stream(seed, positions, sample, domain=domain)
    best = torch.zeros_like(noise.seed)
    width = max(64, tile_elements(logits.device) // max(1, len(logits)))
    for start in range(0, logits.shape[1], width):
        tile = logits[:, start : start + width].float()
        noise_of_tile = tile_noise(streams, first_id + start, tile.shape[1])
        words = order_words(score(tile, noise_of_tile, noise), first_id + start)
        best = best.maximum(words.amax(dim=1))
    return best.unsqueeze(0)
