"""How far an approximate score may lie from the score of the definition: a proof, step by step.

Both scores are made from a product by the same steps, in fp32, so one recursion bounds them. A step
y = fl(f(x)) whose exact f has the Lipschitz constant l turns a bound δ on two inputs' distance into

    δ' = l δ + 2 n (u |y| + η)      u = 2^-24, n operations rounded, η for results below 2^-126

because each of the two results is rounded once per operation. |y| is bounded by the row's largest
`magnitude` M, which every step moves too. The code takes 2 u for u, which covers the products of
several rounding errors and the error of M itself.

    step                       l               M'                      n
    × logit_scale c            |c|             |c| M                   1
    soft-cap c tanh(x / c)     1               min(M, c)               3
    + head bias                1               M + max |bias|          1
    mask                       1               M                       0   -inf on both sides
    + logit_bias               1               M + 100                 1
    repetition r               max(r, 1/r)     max(r, 1/r) M           1   continuous at 0
    - frequency f · count      1               M + |f| max count       2   f · count rounds alike
    - presence p               1               M + |p|                 1
    × log2 e / T               k               k M                     see `of_scores`

All is float64 arithmetic on a few numbers per row, whose own errors of 2^-53 vanish in 2 u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core.score import Head
from tpsample.request.controls.apply import StepControls
from tpsample.request.params import MAX_LOGIT_BIAS
from tpsample.request.step import StepRows

UNIT = 2.0**-24
"""u, the largest relative error of an fp32 operation that rounds to nearest."""
TINY = 2.0**-126
"""η, the largest absolute error where a result is subnormal, flushed to zero or not."""
LARGEST = 2.0**100
"""Rows with a larger magnitude are not bounded: fp32 could overflow."""
NOISE_MAGNITUDE = 512.0
"""More than any noise, its bound, or a sum of the two."""


class Approximation(NamedTuple):
    """Approximate products of a tile, and how far they are from those of the definition.

    Attributes:
        product: fp32 [B, n].
        error: float64 [B, 1] or fp32 [B, n], a bound on |product − definition's product|, at most
            4 (magnitude + 1).
        magnitude: float64 [B, 1], a bound on the absolute value of both, and on every sum on the
            way to them. Neither error nor magnitude need be finite.
    """

    product: Tensor
    error: Tensor
    magnitude: Tensor


class ScoreSlack(NamedTuple):
    """The bound of the scores: slack = gain · error + extra.

    Attributes:
        gain, extra: float64 [B, 1].
        proved: bool [B], whether the bound holds; other rows are computed by the definition.
    """

    gain: Tensor
    extra: Tensor
    proved: Tensor

    def of(self, error: Tensor) -> Tensor:
        """Return the slack of the scores as fp32, rounded up, for an `Approximation.error`."""
        return ((self.gain * error + self.extra) * (1.0 + 8 * UNIT)).float()


def sum_error(num_terms: int) -> float:
    """Return γ with |computed − exact| <= γ Σ |a_i b_i| for an fp32 dot product in any order.

        γ_n = n u / (1 − n u)

    Higham, "Accuracy and Stability of Numerical Algorithms", §3.1: with or without fused
    multiply-adds, for every order of summation. Infinite where the formula proves nothing.
    """
    spread = num_terms * UNIT
    return spread / (1.0 - spread) if spread <= 0.5 else float("inf")


def round_up(values: Tensor) -> Tensor:
    """Return non-negative float64 values as fp32 numbers that are at least as large.

    A conversion to nearest loses at most u of a value, or 2^-150 of a subnormal one, and float64
    arithmetic on up to 2^20 numbers of one sign loses far less than the 2 u that remain.
    """
    return (values * (1.0 + 4 * UNIT) + TINY).float()


def of_scores(
    approximation: Approximation,
    rows: StepRows,
    head: Head,
    bias_tile: Tensor | None,
    first_id: int,
) -> ScoreSlack:
    """Bound the scores that `UpperScores` makes of an approximation of the ids from `first_id`.

    The last step scales and adds the noise and the slack. The definition rounds once there, and
    `UpperScores` five times, so 16 u · (k M + |noise|) is more than both together.
    """
    chain = _Chain(approximation.magnitude)
    if head.logit_scale != 1.0:
        chain.step(abs(head.logit_scale), chain.magnitude * abs(head.logit_scale))
    if head.logit_softcap is not None:
        chain.step(1.0, chain.magnitude.clamp(max=abs(head.logit_softcap) * (1 + UNIT)), 3)
    if bias_tile is not None:
        chain.step(1.0, chain.magnitude + _largest_bias(bias_tile))
    if rows.controls is not None:
        _through_controls(chain, rows.controls, first_id, approximation.product.shape[1])
    k = rows.noise.scale.double()
    extra = chain.extra * k + 16 * UNIT * (chain.magnitude * k + NOISE_MAGNITUDE)
    # A NaN compares as False, so what is not a number is not proved.
    widest = 4 * k * chain.gain * (approximation.magnitude + 1) + extra
    proved = (chain.largest * k.clamp(min=1.0) <= LARGEST) & (widest <= LARGEST)
    return ScoreSlack(chain.gain * k, extra, proved.squeeze(1))


class _Chain:
    """The recursion of the module's docstring; all float64 [B, 1]."""

    def __init__(self, magnitude: Tensor) -> None:
        # Numbers until a step makes them tensors, because every operator costs microseconds.
        self.gain: Tensor | float = 1.0
        self.extra: Tensor | float = 0.0
        self.magnitude = self.largest = magnitude

    def step(self, lipschitz: Tensor | float, magnitude: Tensor, operations: int = 1) -> None:
        self.gain = self.gain * lipschitz
        rounding = 2 * operations * (2 * UNIT * magnitude + TINY)
        self.extra = self.extra * lipschitz + rounding
        self.magnitude, self.largest = magnitude, torch.maximum(self.largest, magnitude)


def _largest_bias(bias_tile: Tensor) -> Tensor:
    """Return max |bias| of the ids that it does not forbid by -inf; NaN and +inf come through."""
    return bias_tile.double().where(bias_tile != -torch.inf, 0.0).abs().amax()


def _through_controls(chain: _Chain, controls: StepControls, first_id: int, num_ids: int) -> None:
    """Add the steps of `StepControls.apply`."""
    tables = controls.rows.tables
    if tables.has_bias:
        chain.step(1.0, chain.magnitude + MAX_LOGIT_BIAS)
    if tables.has_penalties:
        penalties = tables.penalties[controls.rows.slots].double()
        repetition, frequency, presence = penalties.split(1, dim=1)
        factor = torch.maximum(repetition, 1.0 / repetition)
        chain.step(factor, chain.magnitude * factor)
        count = controls.most_occurrences(first_id, num_ids).unsqueeze(1)
        chain.step(1.0, chain.magnitude + frequency.abs() * count, 2)
        chain.step(1.0, chain.magnitude + presence.abs())
