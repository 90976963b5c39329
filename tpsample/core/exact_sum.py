"""The product of a CPU: the exact dot product, rounded once to fp32, to nearest, ties to even.

It names no order, library or machine. Products of two fp32 numbers are exact in float64. Their sum
s in any order is within

    |s − exact| <= D 2^-53 (1 + 2^-20) ‖h‖ ‖w‖        D <= 2^20; Cauchy-Schwarz for Σ |h w|

of the exact one. Where both ends of that interval round to the same fp32 number the sum is decided.
The others, about one in a thousand for D = 4096, are added exactly. A sum that is infinite, or not
a number, is so in every order.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

MARGIN = 2.0**-53 * (1.0 + 2.0**-20)
GATHERED = 2**18
"""Products that are computed at once for undecided sums: 2 MB of float64."""


def exact_products(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Return fp32 [B, n], the exact products of fp32 numbers in float64 [B, D] and [n, D]."""
    total, size = hidden_states @ weight.T, weight.shape[1]
    error = hidden_states.norm(dim=1, keepdim=True) * weight.norm(dim=1) * (size * MARGIN)
    lower, upper = (total - error).float(), (total + error).float()
    rounded = total.float()
    undecided = (lower != upper) & total.isfinite()
    rows, columns = undecided.nonzero(as_tuple=True)
    step = max(1, GATHERED // max(1, size))
    for row, column in zip(rows.split(step), columns.split(step), strict=True):
        products = hidden_states[row] * weight[column]
        rounded[row, column] = exact_sums(products)
    return rounded


def exact_sums(products: Tensor) -> Tensor:
    """Return the exact sum of each row of float64 [P, D], rounded once to fp32 [P]."""
    sums = [_exact_sum(row) for row in products.tolist()]
    return torch.tensor(sums, dtype=torch.float64, device="cpu").float()


def _exact_sum(terms: list[float]) -> float:
    """Return the sum rounded to odd: a float64 number that rounds to fp32 as the exact sum does.

    `math.fsum` rounds to nearest. If its result is inexact and even, the neighbour on the side of
    the exact sum is odd. An fp32 midpoint is even in float64, so none lies between the two.
    """
    total = math.fsum(terms)
    rest = math.fsum([*terms, -total])
    even = struct.unpack("=q", struct.pack("=d", total))[0] & 1 == 0
    return math.nextafter(total, math.copysign(math.inf, rest)) if rest and even else total
