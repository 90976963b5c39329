"""The words of single pairs of a row and a token, exactly as the definition computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.score import Head, head_logits, score_values
from tpsample.request.step import StepRows
from tpsample.screening.candidates import Pairs

CHUNK_ELEMENTS = 2**19
"""Elements of the weight rows that are gathered at once: 4 MB of float64."""


def pair_words(
    pairs: Pairs,
    noise: Tensor,
    rows: StepRows,
    weight_tile: Tensor,
    bias_tile: Tensor | None,
    head: Head,
    first_id: int,
) -> Tensor:
    """Return int64 [P], the word of every pair.

    Args:
        noise: fp32 [P], L of the pairs.
        rows: the rows that `pairs.rows` counts in.
        weight_tile, bias_tile: [n, D] and [n] or None, of the ids from `first_id` on.
    """
    step = max(1, CHUNK_ELEMENTS // max(1, weight_tile.shape[1]))
    products = [
        (rows.hidden_double[row] * weight_tile[column].double()).sum(dim=1)
        for row, column in zip(pairs.rows.split(step), pairs.columns.split(step), strict=True)
    ]
    product = torch.cat(products)
    bias = None if bias_tile is None else bias_tile[pairs.columns]
    logits = head_logits(product.float(), bias, head)
    token_ids = pairs.columns + first_id
    if rows.controls is not None:
        logits = rows.controls.apply_to_pairs(logits, pairs.rows, token_ids)
    scale, random = rows.noise.scale[pairs.rows, 0], rows.noise.random[pairs.rows, 0]
    return word.pack(score_values(logits, noise, scale, random), token_ids)
