"""Integer masses of a row's tokens and their entropy, by fp32 and integer operations alone.

    E   (x - max x) · log2 e / T = w + f            an integer w <= 0, and fp32 f, |f| <= 1/2
    q   rint(2^40 · 2^E)                            int64, 0 … 2^40; the top's is 2^40
    m   -q w - rint(2^40 · 2^E f)                   int64, about -q E: the sum of entropies

`tpsample/MASSES.md` names each operation and proves the errors: at most 2^-22 of a mass. No
operation is fused, and none is of float64, so any device finds the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TOP_MASS = 2**40
"""Mass of the most likely token."""

LN2 = math.log(2)
LN2_HIGH = 0.693147182464599609375
LN2_LOW = -1.9046542121259175e-09
LOG2_E = 1.44269502162933349609375
"""Of ln 2 and log2 e, fp32 numbers."""

POLYNOMIAL = (
    1.0,
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398873852565885,
    0.00015353361959569156,
)
"""2^f on |f| <= 1/2, within 2^-28.9 before rounding: fp32 numbers, the constant first."""

ROUNDER = 1.5 * 2.0**23
"""Adding it rounds an fp32 number below 2^22 to an integer, in the lowest bits."""
ROUNDER_BITS = 0x4B400000

NEAR = 85.0
"""Where |max x| · log2 e / T is not below it, x - max x is exact for every token with a mass."""
FLOOR = 42.0
"""Tokens whose E is below -FLOOR are taken for one there, which has no mass either."""
SHORT = -128
"""A mask of the first 17 significant bits of an fp32 number: multiples up to 127 are exact."""

ABOUT_ERROR = 2.0**-17
"""How far sums of e^((x - max x) / T) in fp32 may be off from masses, as a share of the total.

A kernel that needs no exact masses computes 2^((x - max x) · (log2 e / T)). The difference, the
product and log2 e are rounded, and a quick quotient is off by 2^-22, which makes 2^-21.3 of the
exponent E. Of up to 2^20 tokens Σ q |E| / Σ q is at most 15.2, where all but the first are equally
likely. So this error is 2^-17.9 of the total. The power and the masses are each off by 2^-22, and
by 2^-21 because masses are whole numbers. Up to 20 additions in a row add 20 · 2^-24: 8 tokens of a
thread, 8 blocks, and the threads of a warp. Together they are 2^-17.3.
"""


class MassRow(NamedTuple):
    """The numbers of a row that its masses need, fp32, in every backend; see MASSES.md.

    Attributes:
        base: what is taken from a logit first: 0 or the top.
        high, low: what is left lies between them.
        scale: log2 e / T.
        unit, rest: T ln 2 = unit + rest, of 17 significant bits each.
        start: high = n · unit + start, n an integer.
        turn: high · scale - n.
        rounder: ROUNDER - n.
    """

    base: Tensor
    high: Tensor
    low: Tensor
    scale: Tensor
    unit: Tensor
    rest: Tensor
    start: Tensor
    turn: Tensor
    rounder: Tensor


def mass_row(top: Tensor, temperature: Tensor) -> MassRow:
    """Return the numbers of rows that their masses need.

    Args:
        top: fp32 largest logit of the row, over all ranks.
        temperature: fp32, from 1e-5 to 2^100.
    """
    scale = torch.full_like(temperature, LOG2_E) / temperature  # a number would be multiplied
    unit = _short(temperature * LN2_HIGH)
    # The difference is exact in float64, so it is rounded once.
    left = (temperature.double() * LN2_HIGH - unit.double()).float()
    rest = _short(left + temperature * LN2_LOW)
    near = (top * scale).abs() < NEAR
    base, high = torch.where(near, 0.0, top), torch.where(near, top, 0.0)
    turns = high * scale
    n = (turns + ROUNDER) - ROUNDER
    low, start = high - unit * FLOOR, high - n * unit
    return MassRow(base, high, low, scale, unit, rest, start, turns - n, ROUNDER - n)


def masses(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Return q, int64, of fp32 logits; `top` and `temperature` of their rows broadcast."""
    return _rounded(_powers(logits, mass_row(top, temperature))[0])


def masses_and_moments(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and m, int64 each, of fp32 logits; `top` and `temperature` broadcast."""
    power, whole, fraction = _powers(logits, mass_row(top, temperature))
    mass = _rounded(power)
    return mass, -(mass * whole.to(torch.int64)) - _rounded(power.mul_(fraction))


@torch.no_grad()
def _powers(logits: Tensor, row: MassRow) -> tuple[Tensor, Tensor, Tensor]:
    """Return 2^E, w and f, fp32, without gradients. Each operation is rounded once."""
    # An infinite top is a NaN now, and `high` is 0. Both `fmin` and `fmax` take 15 times as long.
    x = (logits - row.base).nan_to_num_(nan=0.0)
    x = torch.maximum(torch.minimum(x, row.high, out=x), row.low, out=x)
    shifted = (x * row.scale).sub_(row.turn).add_(row.rounder)
    whole = shifted - ROUNDER
    x = x.sub_((shifted - row.rounder).mul_(row.unit)).sub_(row.start)
    fraction = x.sub_(whole * row.rest).mul_(row.scale)
    power = torch.full_like(fraction, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power.mul_(fraction).add_(coefficient)
    # `shifted` ends in the bits of w, which go to the exponent.
    power.view(torch.int32).add_(shifted.view(torch.int32).bitwise_left_shift_(23))
    return power, whole, fraction


def _rounded(power: Tensor) -> Tensor:
    """Return rint(2^40 · power), int64."""
    return (power * TOP_MASS).round_().to(torch.int64)


def _short(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & SHORT).view(torch.float32)
