"""Token-wise verification: accept a draft x with probability min(1, p(x) / q(x)), one by one.

    a = the number of drafts before the first with u q(x) >= p(x); behind it the residual at c = 1

The tokens follow the target's law at every position, whatever the draft (Leviathan et al.,
arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from torch import Tensor

from tpsample.speculative.output import leading


def accept_tokenwise(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], how many drafts are accepted.

    Args:
        p, q: float64 [B, K + 1], both laws at the draft; q = 0 where there is none.
        u: float64 [B, K + 1], the uniforms.
    """
    return leading((u * q < p) & (q > 0))
