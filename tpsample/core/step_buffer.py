"""Memory that every step writes anew, and that a captured CUDA graph may keep in use."""

from __future__ import annotations

import torch
from torch import Tensor


class StepBuffer:
    """Tensors [num_rows, width] out of one allocation, which grows when it must.

    Old buffers are kept, because a captured CUDA graph may still write to them. Together they are
    never larger than the current one.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width = width
        with torch.inference_mode(False):
            self._flat = torch.empty(0, dtype=dtype, device=device)
        self._outgrown: list[Tensor] = []

    def take(self, num_rows: int) -> Tensor:
        """Return an uninitialised tensor, which replaces the one taken before."""
        size = num_rows * self._width
        if self._flat.numel() < size:
            self._outgrown.append(self._flat)
            with torch.inference_mode(False):  # the next step may be outside of it
                self._flat = self._flat.new_empty(max(size, 2 * self._flat.numel()))
        return self._flat[:size].view(num_rows, self._width)


def capturing(device: torch.device) -> bool:
    """Return whether this step is being captured, so that the host must not read the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
