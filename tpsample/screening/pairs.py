"""Logits and words of single pairs of a row and a token, exactly as the definition has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import Head, head_logits, score_values
from tpsample.request.step import StepRows
from tpsample.screening.noise_bound import Pairs

CHUNK_ELEMENTS = 2**19
"""Elements of the weight rows that are gathered at once: 4 MB of float64."""


class HeadTile(NamedTuple):
    """The part of an LM head that makes the logits of n token ids.

    Attributes:
        first_id: the ids are first_id … first_id + n - 1.
        weight: [n, D].
        bias: [n] or None.
        head: what happens to a product before it is a logit.
    """

    first_id: int
    weight: Tensor
    bias: Tensor | None
    head: Head


def pair_words(pairs: Pairs, noise: Tensor, rows: StepRows, tile: HeadTile) -> Tensor:
    """Return int64 [P], the word of every pair of a row of `rows` and a column of the tile.

    Args:
        noise: fp32 [P], L of the pairs.
    """
    logits = pair_logits(pairs, rows, tile)[1]
    scale, random = rows.noise.scale[pairs.rows, 0], rows.noise.random[pairs.rows, 0]
    return word.pack(score_values(logits, noise, scale, random), pairs.columns + tile.first_id)


def pair_logits(pairs: Pairs, rows: StepRows, tile: HeadTile) -> tuple[Tensor, Tensor]:
    """Return the logits of pairs, fp32 [P], before the request controls and behind them."""
    step = max(1, CHUNK_ELEMENTS // max(1, tile.weight.shape[1]))
    products = [
        (rows.hidden_double[row] * tile.weight[column].double()).sum(dim=1)
        for row, column in zip(pairs.rows.split(step), pairs.columns.split(step), strict=True)
    ]
    bias = None if tile.bias is None else tile.bias[pairs.columns]
    logits = head_logits(torch.cat(products).float(), bias, tile.head)
    if rows.controls is None:
        return logits, logits
    token_ids = pairs.columns + tile.first_id
    return logits, rows.controls.apply_to_pairs(logits, pairs.rows, token_ids)
