"""The residual of two laws by integers alone, and the scores of a draw from it.

    A     trunc(2^102 · c / Z_P)             int64, 0 … 2^62: the weight of the target's masses
    B     trunc(2^102 / Z_Q)                 that of the draft's, 0 without a draft
    R_v   max([P_v A / 2^40] - [Q_v B / 2^40], 0)     int64, max(c p_v - q_v, 0) in units of 2^-62
    score (k + shift) + (log2 m - L_v)       fp32, where the number of v is 2^k m, 1 <= m < 2

A and B are computed once per row, in float64. A product is exact, and [ ] rounds it down. A share
is off by less than 2^-61, so a sum of V of them is off by at most V · 2^-61. The number of a token
is R_v, rounded once to fp32, and its shift is -62.

A token without a residual has the number P_v and the shift -168. So a row whose residual is zero
everywhere, because p and q are equal up to rounding, draws from p. No other row is changed by this:
noise spans -5 to 49, and the least residual is worth 106 more than any such token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.masses import TOP_MASS

SHARE_BITS = 62
"""A share of 1 is 2^62."""
MASS_BITS = TOP_MASS.bit_length() - 1
LIMB = 21
"""Bits of a part of a weight: its product with a mass has at most 61."""
PLAIN_SHIFT = -128 - MASS_BITS
"""The shift of a token without a residual."""


def share_weight(coefficient: Tensor, total: Tensor) -> Tensor:
    """Return the int64 weight by which masses become shares; 0 where there is no law.

    Args:
        coefficient: float64, 0 to 1.
        total: int64, the sum of the masses; a law's is at least that of its top.
    """
    weight = coefficient / total.clamp(min=1).double() * 2.0 ** (SHARE_BITS + MASS_BITS)
    return weight.where(total >= TOP_MASS, 0.0).to(torch.int64)


def shares(mass: Tensor, weight: Tensor) -> Tensor:
    """Return floor(mass · weight / 2^40), int64, of masses up to 2^40 and weights up to 2^62."""
    low, middle = weight & (2**LIMB - 1), (weight >> LIMB) & (2**LIMB - 1)
    rest = mass * middle + (mass * low >> LIMB)
    return (mass * (weight >> 2 * LIMB) << 2) + (rest >> MASS_BITS - LIMB)


def residuals(target: Tensor, weight: Tensor, draft: Tensor, draft_weight: Tensor) -> Tensor:
    """Return R, int64, of the masses of both laws; the arguments broadcast."""
    return (shares(target, weight) - shares(draft, draft_weight)).clamp_(min=0)


def recovery_scores(residual: Tensor, target: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 scores whose largest is a draw from the residual; -inf outside the target's law.

    Args:
        residual: int64, R.
        target: int64, the target's masses, which count where there is no residual.
        noise: fp32, L.
    """
    number = torch.where(residual > 0, residual, target).float()
    exponent = torch.where(residual > 0, -SHARE_BITS, PLAIN_SHIFT)
    bits = number.view(torch.int32)
    exponent = (exponent + (bits >> 23) - 127).float()
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    score = exponent + (mantissa.double().log2().float() - noise)
    return score.where(number > 0, -torch.inf)
