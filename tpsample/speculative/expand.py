"""One row per position to verify: B requests become B · (K + 1) rows."""

from __future__ import annotations

import torch
from torch import Tensor


def position_of_rows(positions: Tensor, width: int) -> Tensor:
    """int64 [B · width]: the absolute positions of the expanded rows."""
    index = torch.arange(width, device=positions.device)
    return (positions.unsqueeze(1) + index).flatten()
