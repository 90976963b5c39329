"""The random numbers of the ratio rules: layout ``tps-philox-v1`` in domains of their own.

Accepting, recovering and drafting must be independent of each other and of token noise, so each has
its own domain word in the counter of the row stream. The `sample` word of the counter is the index
of the position within its verification. A position that a verification looked at and did not reach
is verified again by the next one, under a smaller index and so with fresh numbers. It needs them,
because the stopping place of a block already depended on the old ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.noise import row_stream

DOMAIN_ACCEPT = 0x61636370
DOMAIN_RECOVERY = 0x72637672
DOMAIN_DRAFT = 0x64726674


def stream(seed: Tensor, position: Tensor, index: Tensor | int, domain: int) -> tuple[Tensor, ...]:
    """Return the row stream of one use of an absolute position, all int64 [B].

    Args:
        index: of the position within its verification; 0 is the first.
    """
    return row_stream(seed, position, index, domain=domain)


def uniforms(seed: Tensor, positions: Tensor, num_positions: int) -> Tensor:
    """Return u in (0, 1) for each position to verify: odd multiples of 2^-53, float64
    [B, num_positions].

    Args:
        seed: int64 [B].
        positions: int64 [B], absolute position of each row's first token.
    """
    index = torch.arange(num_positions, device=seed.device)
    high, low, *_ = stream(seed.unsqueeze(1), positions.unsqueeze(1) + index, index, DOMAIN_ACCEPT)
    bits = (high << 20) | (low >> 12)
    return (2 * bits + 1).double() * 2.0**-53
