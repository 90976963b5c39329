"""The first pass that a CPU takes: products by the BLAS in fp32, in whatever order it adds.

    |product − definition's product| <= γ m_b + η_b,   m_b = max|w| · Σ_d |h_bd| >= Σ_d |h_bd w_vd|

max|w| is over the tile, and is read while the weights are in the cache. So nothing is kept between
steps that could go stale when the weights change. m_b bounds every partial sum too.

    γ     n u / (1 − n u) with n = D + 4: D − 1 additions and D products rounded in fp32, of which a
          product and an addition make one term of the formula; the definition rounds once, and its
          float64 sum is off by D 2^-53; what remains covers the rounding of m_b
    η_b   2^-126 (2 D + Σ |h| + D max|w|), if subnormal products, sums, hidden states or weights are
          lost, as they are where the process flushes them to zero

Weights in bf16 or fp16 are converted a chunk at a time, which is exact. Measured on one thread
(EPYC, AVX-512, 24576 × 576, B = 1), a product in bf16 by the library takes 3.4 ms and this one 4.6,
but no promise is known about how the library adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpsample.request.step import StepRows
from tpsample.screening.bound import TINY, Approximation, sum_error

CHUNK_ELEMENTS = 2**19
"""Weights read at a time: 2 MB of fp32, which the cache still holds when they are read again."""

CONVERTED_EXACTLY = (torch.float32, torch.bfloat16, torch.float16)
_MKLDNN: Any = torch.backends.mkldnn


class Fp32Pass:
    """Approximate products of a shard's rows, in fp32.

    Args:
        weight: [V_local, D] on a CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        num_ids = max(1, min(len(weight), CHUNK_ELEMENTS // max(1, weight.shape[1])))
        self._works = weight.dtype in CONVERTED_EXACTLY and all(
            _multiplies_in_fp32(rows, num_ids, weight) for rows in (1, 16)
        )

    @property
    def row_bytes(self) -> int:
        """The bytes of one id's weights."""
        return self._weight.shape[1] * self._weight.itemsize

    def available(self) -> bool:
        """Return whether fp32 products are made in fp32.

        PyTorch can be told to take bf16, by a setting that may change between steps, and so can
        the libraries below it, by variables that they read once.
        """
        return self._works and _MKLDNN.matmul.fp32_precision in ("none", "ieee")

    def tile(self, rows: StepRows, start: int, stop: int) -> Approximation:
        """Multiply the weight rows from `start` to `stop`; n = stop − start."""
        num_ids, hidden_size = stop - start, self._weight.shape[1]
        hidden = rows.hidden_states.float()
        product = hidden.new_empty(len(rows), num_ids)
        step = max(1, CHUNK_ELEMENTS // max(1, hidden_size))
        converted = None
        if self._weight.dtype != torch.float32:
            converted = hidden.new_empty(min(step, num_ids), hidden_size)
        extremes: list[Tensor] = []
        for first in range(start, stop, step):
            chunk = self._weight[first : min(first + step, stop)]
            if converted is not None:
                chunk = converted[: len(chunk)].copy_(chunk)
            columns = product[:, first - start : first - start + len(chunk)]
            # With `out` the product stays in fp32 under autocast.
            torch.mm(hidden, chunk.T, out=columns)
            extremes += torch.aminmax(chunk)
        largest = torch.stack(extremes).abs().amax().double()
        total = rows.hidden_double.abs().sum(dim=1, keepdim=True)
        magnitude = largest * total
        gamma = sum_error(hidden_size + 4)
        lost = TINY * (2 * hidden_size + total + hidden_size * largest)
        # Where γ proves nothing, an infinite magnitude says so.
        magnitude = magnitude if gamma <= 1 else torch.full_like(magnitude, torch.inf)
        return Approximation(product, gamma * magnitude + lost, magnitude)


def _multiplies_in_fp32(num_rows: int, num_ids: int, weight: Tensor) -> bool:
    """Try a product of numbers that bf16, fp16 and tf32 would round to 1, as large as a step's."""
    hidden_size, near_one = weight.shape[1], 1.0 + 2.0**-12
    hidden, others, product = (
        weight.new_full(shape, near_one, dtype=torch.float32)
        for shape in ((num_rows, hidden_size), (num_ids, hidden_size), (num_rows, num_ids))
    )
    torch.mm(hidden, others.T, out=product)
    off = (product.double() / max(1, hidden_size) - near_one**2).abs()
    return bool((off < 2.0**-13).all())
