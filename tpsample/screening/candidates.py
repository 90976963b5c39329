"""From upper bounds of scores to the few pairs of a row and a column that must be computed.

    upper_v = k x_v − gain bits_v + slack_v        x_v approximate logit, k = log2 e / T
              gain = 2^-23 and slack_v + NOISE_TOP in a random row; gain = 0 in a greedy one

`noise_bound` explains bits_v, and `bound` explains slack_v. A token whose upper bound is -inf is
masked, and the score of a masked token is -inf exactly.

Bounds are looked at in blocks of columns: only a block whose maximum is high enough is searched, so
a tile is read once, by one reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.row_noise import RowNoise
from tpsample.screening.noise_bound import BITS_SCALE, NOISE_TOP, Pairs, TileNoise

BLOCK = 64
LOWEST = torch.finfo(torch.float32).min


class UpperScores:
    """The upper bounds of a tile's scores.

    Args:
        logits: fp32 [B, n], approximate, but processed like the definition's.
        slack: fp32 [B, 1] or [B, n], `ScoreSlack.of` the error.
        noise: of the tile; None if no row is random.
        row_noise: of the rows.
    """

    def __init__(
        self, logits: Tensor, slack: Tensor, noise: TileNoise | None, row_noise: RowNoise
    ) -> None:
        num_rows, num_columns = logits.shape
        num_blocks = -(-num_columns // BLOCK)
        upper = logits.new_empty(num_rows, num_blocks * BLOCK)
        upper[:, num_columns:] = -torch.inf
        used = upper[:, :num_columns]
        torch.mul(logits, row_noise.scale, out=used)
        if noise is not None:
            random = row_noise.random.float()
            used.addcmul_(noise.bits().float(), random * -BITS_SCALE)
            slack = slack + random * NOISE_TOP
        used.add_(slack)
        self._blocks = upper.view(num_rows, num_blocks, BLOCK)
        self._block_max = self._blocks.amax(dim=2)

    def highest(self) -> Pairs:
        """Return each row's first column with the highest bound."""
        rows = torch.arange(self._blocks.shape[0], device=self._blocks.device)
        block = self._block_max.argmax(dim=1)
        return Pairs(rows, block * BLOCK + self._blocks[rows, block].argmax(dim=1))

    def at_least(self, scores: Tensor) -> Pairs:
        """Return every column whose bound reaches its row's score, fp32 [B]; none for a NaN.

        A masked column is left out, even where the score is -inf.
        """
        return at_least(self._blocks, self._block_max, scores)


def at_least(blocks: Tensor, block_max: Tensor, bars: Tensor) -> Pairs:
    """Return every column of fp32 [B, n / BLOCK, BLOCK] that reaches its row's bar, fp32 [B].

    None of a row whose bar is a NaN, and no -inf.

    Args:
        block_max: the largest of every block.
    """
    bar = bars.clamp(min=LOWEST).unsqueeze(1)
    rows, block = (block_max >= bar).nonzero(as_tuple=True)
    found, place = (blocks[rows, block] >= bar[rows]).nonzero(as_tuple=True)
    return Pairs(rows[found], block[found] * BLOCK + place)


def limit(num_columns: int) -> int:
    """Return how many candidates of a row are computed one by one.

    A row with more of them in a tile has the tile computed by the definition. In a batch of 64 rows
    a pair costs about as much as 64 columns of that, so it then takes no longer; in a small batch
    the definition converts the weights for few rows, and the limit could be higher.
    """
    return max(8, num_columns // 64)
