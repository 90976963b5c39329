"""Distances of a row's logits from the largest one, as integers, whose sums give the spread.

    d   rint(2^19 · min(max x - x, 4096))       int64, 0 … 2^31, in units of 2^-19 of a logit
    σ   sqrt(Σ d² / n - (Σ d / n)²) / 2^19      over the n unmasked tokens, float64

Subtraction, minimum and the product by 2^19 are fp32 operations, each rounded once. Squares are
integers below 2^63, and their sums are taken in two halves of 32 bits. So no sum depends on the
order of summation, hence not on ranks, shards or tiles. Logits more than 4096 below the largest one
count as 4096 below.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2.0**19
"""Units per logit."""
FARTHEST = 4096.0
"""The largest distance."""
HALF_BITS = 32
"""Bits of the lower half of a square."""
INTEGERS_FROM = 2.0**23
"""Every fp32 number from it on is an integer; adding it rounds a lower one >= 0 to an integer."""


def spread_sums(logits: Tensor, top: Tensor) -> Tensor:
    """Return int64 [F, 4]: n, Σ d, Σ (d² >> 32) and Σ (d² mod 2^32) over the unmasked logits.

    Args:
        logits: fp32 [F, n].
        top: fp32 [F], largest logits over all ranks.
    """
    top = top.unsqueeze(1)
    distance = (top - logits).masked_fill(logits == top, 0.0).clamp(max=FARTHEST)
    d = (distance * UNITS).round().to(torch.int64)
    unmasked = logits > -torch.inf
    square = d * d
    parts = torch.ones_like(d), d, square >> HALF_BITS, square & ((1 << HALF_BITS) - 1)
    return torch.stack([(part * unmasked).sum(dim=1) for part in parts], dim=1)


def spread_of(sums: Tensor) -> Tensor:
    """Return σ, float64 [F], of the `spread_sums` over all ranks."""
    count, total, high, low = sums.double().unbind(dim=1)
    mean = total / count
    variance = (high * 2.0**HALF_BITS + low) / count - mean * mean
    return variance.clamp(min=0).sqrt() / UNITS
