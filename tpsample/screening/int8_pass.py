"""The first pass over the 8-bit copy, in plain PyTorch: what a kernel of it has to compute.

The hidden states of a row become two 8-bit limbs, ĥ = t (256 hi + lo):

    t  = max|h| / (127 · 256),  z = rint(h / t),  hi = floor((z + 128) / 256),  lo = z − 256 hi

so hi is in -127 … 127 and lo in -128 … 127, and with n = 256 (q · hi) + q · lo, an integer that is
exact in any order (the int32 sums are exact for D <= 131072),

    product_vb = s_v t_b n
    |product − definition's product| <= Σ_j residual_vj ‖h_b‖_j + norm_v (lost_b + γ ‖h_b‖)

    w·h − ŵ·ĥ = (w − ŵ)·h + ŵ·(h − ĥ)      Cauchy-Schwarz per block of columns for the first term
    ‖ŵ_v‖ <= norm_v + Σ_j residual_vj       for the second: lost_b also joins every ‖h_b‖_j

    lost_b = ‖h_b − ĥ_b‖;  γ is what the definition's own product may be off, relative to
    norm_v ‖h_b‖.  Eight fp32 roundings of the approximate product, which is at most ‖ŵ_v‖ ‖ĥ_b‖,
    are allowed for: 2^-21 (‖h_b‖ + lost_b) joins lost_b everywhere. No other error of fp32 enters,
    because norms are rounded up and the bound itself is computed in float64.

On a CPU the definition's product is a float64 sum rounded once. A kernel whose exact products are
summed in fp32 passes its own γ: `bound.sum_error(D)` if it rounds to nearest, and (D / 16 + 32)
2^-22 for tensor cores that truncate, which has to be confirmed on each.

A kernel that makes its noise on the way has, in place of the score of a computed token, the bar

    best = max_u lower_u,   lower_u = approximate score_u − slack_u
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.request.step import StepRows
from tpsample.screening.bound import TINY, UNIT, Approximation, round_up
from tpsample.screening.int8_copy import Int8Copy, block_norms

DEFINITION_ERROR = 2 * UNIT
"""γ of a product that is summed in float64 and rounded once."""
ROUNDING = 8 * UNIT
"""Of the approximate product; a kernel rounds the limbs' sum and three products."""


class Int8Pass:
    """Approximate products of a shard's rows, from an 8-bit copy of them.

    Args:
        copy: of the weight that the definition multiplies, as it is now.
        definition_error: γ of the definition's own product.
    """

    def __init__(self, copy: Int8Copy, definition_error: float = DEFINITION_ERROR) -> None:
        self._copy, self._gamma = copy, definition_error

    def tile(self, rows: StepRows, start: int, stop: int) -> Approximation:
        """Multiply the weight rows from `start` to `stop`; n = stop − start."""
        copy, ids, hidden = self._copy, slice(start, stop), rows.hidden_double
        high, low, unit = limbs(hidden)
        quantised = copy.quantised[ids].double().T
        whole = 256.0 * (high.double() @ quantised) + low.double() @ quantised
        product = (whole * unit * copy.scale[ids].double()).float()

        kept = unit * (256.0 * high.double() + low.double())
        norm = hidden.norm(dim=1, keepdim=True)
        lost = (hidden - kept).norm(dim=1, keepdim=True)
        rounding = ROUNDING * (norm + lost)
        of_blocks = block_norms(hidden, copy.bounds) + lost + rounding
        of_row = lost + self._gamma * norm + rounding
        norms, largest = copy.norm[ids].double(), copy.norm[ids].double().amax()
        # As in `fp32_pass`, and the sums there are at most sqrt(D) times these norms.
        flushed = TINY * hidden.shape[1] * (3 + norm + largest)
        error = of_blocks @ copy.residual[ids].double().T + of_row * norms + flushed
        return Approximation(product, round_up(error), 4 * norm * largest)


def limbs(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hi and lo, int8 [B, D], and t, float64 [B, 1], of hidden states in float64.

    Every t is an fp32 number, as a kernel would have it.
    """
    unit = (hidden.abs().amax(dim=1, keepdim=True) / (127 * 256)).float()
    unit = unit.where((unit >= TINY) & unit.isfinite(), 1.0).double()
    whole = (hidden / unit).round().nan_to_num(0.0, 0.0, 0.0)
    high = torch.floor((whole + 128) / 256)
    return high.to(torch.int8), (whole - 256 * high).to(torch.int8), unit
