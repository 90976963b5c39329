"""The words of tiles that a local step tells of its stored rows, from their logits."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core.order import order_words
from tpsample.core.score import score_tile
from tpsample.request.step import TileWords


def told(rows: TritonShardLogits, size: int = 64) -> TritonShardLogits:
    """Return the rows with the words of tiles of so many ids; an empty shard has none."""
    if not rows.logits.shape[1]:
        return rows
    orders = order_words(rows.logits, rows.first_id).unsqueeze(1)
    scores = [
        order_words(score_tile(rows.logits, rows.first_id, rows.noise, sample), rows.first_id)
        for sample in range(rows.noise.num_samples)
    ]
    lead, width = rows.first_id % 4, rows.logits.shape[1]
    words = F.pad(torch.stack([orders[:, 0], *scores], dim=1), (lead, -(lead + width) % size))
    first, best = words.unflatten(2, (-1, size)).amax(dim=3).split([1, len(scores)], dim=1)
    return replace(rows, tile_words=TileWords(first[:, 0].contiguous(), best.contiguous(), size))
