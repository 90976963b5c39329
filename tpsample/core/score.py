"""Logits to scores: the arithmetic every path shares, in plain PyTorch.

    logit = accumulated product -> × logit_scale -> soft-cap -> + bias               fp32
            a product that is +inf, as of hidden states that overflowed, is NaN
    score = fma(logit, log2 e / T, -L)      random row, L from `tpsample.noise`
    score = logit                           greedy row

Each fp32 operation is computed in float64 and rounded once. On a CPU the product is the exact dot
product, rounded once to fp32. So no logit depends on a library, or on how the vocabulary or batch
was cut. On a GPU the plain twin sums it in float64 and rounds that sum.

Where logit · log2 e / T exceeds fp32 the logit counts as infinite, whatever the other logits are:
as masked below zero, as forced above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core.exact_sum import exact_products
from tpsample.core.row_noise import LOG2_E, RowNoise
from tpsample.noise import tile_noise, token_noise

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that a caller's logits and biases may have. fp32 holds each of their numbers."""

CHUNK_ELEMENTS = 2**18
"""Weights that a CPU converts at a time: 2 MB of float64, which its cache still holds when they are
multiplied. Converting all of them first was measured to take up to 13 times as long."""

TANH_SMALL = 2.0**-7
"""Below it tanh is three terms of its series, whose remainder is less than 2^-46 of it."""

POWER_OF_2 = [math.log(2) ** n / math.factorial(n) for n in range(14)]
"""Taylor series of 2^f; on |f| <= 1/2 its remainder is below 2^-57."""


@dataclass(frozen=True)
class Head:
    """How the LM head turns a product into a logit; must match across ranks.

    Attributes:
        logit_scale: a factor of the product (Cohere, Granite).
        logit_softcap: c in c · tanh(logit / c) (Gemma), or None.
    """

    logit_scale: float = 1.0
    logit_softcap: float | None = None


def logits_tile(
    hidden_states: Tensor, weight_tile: Tensor, bias_tile: Tensor | None, head: Head
) -> Tensor:
    """Return fp32 logits [B, n] of n vocabulary rows.

    Args:
        hidden_states: [B, D] in float64 (the caller converts once).
        weight_tile: [n, D], any floating dtype.
        bias_tile: [n] or None.
    """
    num_ids, hidden_size = weight_tile.shape
    at_once = num_ids
    if weight_tile.is_cpu:
        at_once = min(num_ids, max(1, CHUNK_ELEMENTS // max(1, hidden_size)))
    converted = weight_tile.new_empty(at_once, hidden_size, dtype=torch.float64)
    product = hidden_states.new_empty(len(hidden_states), num_ids, dtype=torch.float32)
    for first in range(0, num_ids, max(1, at_once)):
        chunk = weight_tile[first : first + at_once]
        doubles = converted[: len(chunk)].copy_(chunk)
        columns = product[:, first : first + at_once]
        if weight_tile.is_cpu:
            columns.copy_(exact_products(hidden_states, doubles))
        else:
            columns.copy_(hidden_states @ doubles.T)
    # An overflow is no logit. It would be a forced token.
    return head_logits(product.masked_fill_(product == torch.inf, torch.nan), bias_tile, head)


def head_logits(product: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    """Return fp32 logits of fp32 products of any shape; `bias` broadcasts, or is None."""
    logits = product
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.logit_softcap is not None:
        cap = float(torch.tensor(head.logit_softcap, dtype=torch.float32, device="cpu"))
        logits = tanh((logits / cap).double()).float() * cap
    if bias is not None:
        logits = logits + bias.float()
    return logits


def tanh(x: Tensor) -> Tensor:
    """Return tanh of float64 numbers, by IEEE operations alone, so that no library decides a bit.

    The relative error is below 2^-44; the result is rounded to fp32.
    """
    size = x.abs()
    square = size * size
    large = 1.0 - 2.0 / (power_of_2(size.clamp(max=64.0) * (2.0 * LOG2_E)) + 1.0)
    small = size * (1.0 - square / 3.0 + square * square * (2.0 / 15.0))
    return torch.where(size < TANH_SMALL, small, large).copysign(x)


def power_of_2(exponent: Tensor) -> Tensor:
    """Return 2^x of float64 x, |x| <= 1000, by IEEE operations alone."""
    whole = exponent.round()
    fraction = exponent - whole
    power = torch.full_like(fraction, POWER_OF_2[-1])
    for coefficient in POWER_OF_2[-2::-1]:
        power.mul_(fraction).add_(coefficient)
    # 2^whole from its exponent bits, so the scaling is exact.
    return power.mul_(whole.to(torch.int64).add_(1023).bitwise_left_shift_(52).view(torch.float64))


def score_tile(logits: Tensor, first_id: int, row_noise: RowNoise, sample: int) -> Tensor:
    """Return fp32 scores [B, n] of the logits of token ids first_id … first_id + n - 1."""
    noise = tile_noise(row_noise.streams[sample], first_id, logits.shape[1])
    return score(logits, noise, row_noise)


def score_tokens(logits: Tensor, token_ids: Tensor, row_noise: RowNoise, sample: int) -> Tensor:
    """Return fp32 scores [B, n] of the logits of any token ids, int64 [B, n]."""
    noise = token_noise(row_noise.streams[sample], token_ids)
    return score(logits, noise, row_noise)


def score(logits: Tensor, noise: Tensor, row_noise: RowNoise) -> Tensor:
    """Return fp32 scores [B, n] of logits [B, n] with L = `noise` [B, n]."""
    product = logits.double() * row_noise.scale.double()
    return torch.where(row_noise.random, product - noise.double(), product).float()
