"""The arithmetic on rows by which a verification by ratio accepts drafts, in float64.

`tpsample.speculative.acceptance` has the rules. p and q are both laws at the drafts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.noise import row_stream

DOMAIN_ACCEPT, DOMAIN_RECOVERY, DOMAIN_DRAFT = 0x61636370, 0x72637672, 0x64726674
"""Words of the counter of a row's stream; that of tokens is another (`tpsample.noise`)."""


def accept_tokenwise(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], how many drafts are accepted, each with probability min(1, p / q).

    Args:
        p, q: float64 [B, K + 1], both laws at the draft; q = 0 where there is none.
        u: float64 [B, K + 1], the uniforms.
    """
    return leading((u * q < p) & (q > 0))


def coefficients(p: Tensor, q: Tensor) -> Tensor:
    """Return c_0 … c_K, float64 [B, K + 1]; 0 behind a position without a draft.

    Args:
        p, q: float64 [B, K + 1], both laws at the draft of each position.
    """
    chain = [torch.ones_like(p[:, 0])]
    for i in range(p.shape[1] - 1):
        ratio = torch.where(q[:, i] > 0, p[:, i] / q[:, i], 0.0)
        chain.append((chain[-1] * ratio).clamp(max=1))
    return torch.stack(chain, dim=1)


def accept_block(coefficient: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], how many drafts are accepted.

    Args:
        coefficient, sums: float64 [B, K + 1], c_i and s_i.
        u: float64 [B, K + 1]; u_i is that of position i - 1, whose draft ends the prefix.
    """
    passed = u[:, :-1] * (sums + 1 - coefficient)[:, 1:] < sums[:, 1:]
    length = torch.arange(coefficient.shape[1], device=u.device)
    return (F.pad(passed, (1, 0)) * length).amax(dim=1)


def uniforms(seed: Tensor, positions: Tensor, num_positions: int) -> Tensor:
    """Return u in (0, 1) for each position to verify: odd multiples of 2^-53, float64
    [B, num_positions].

    Args:
        seed: int64 [B].
        positions: int64 [B], absolute position of each row's first token.
    """
    index = torch.arange(num_positions, device=seed.device)
    at = seed.unsqueeze(1), positions.unsqueeze(1) + index, index
    high, low, *_ = row_stream(*at, domain=DOMAIN_ACCEPT)
    bits = (high << 20) | (low >> 12)
    return (2 * bits + 1).double() * 2.0**-53


def position_of_rows(positions: Tensor, num_positions: int) -> Tensor:
    """Return int64 [B · num_positions], the absolute position of each row to verify.

    Args:
        positions: int64 [B], those of each request's first.
    """
    index = torch.arange(num_positions, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()


def leading(accepted: Tensor) -> Tensor:
    """Return int64 [B], how many of bool [B, K + 1] are true before the first that is not."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)
