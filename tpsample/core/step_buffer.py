"""Memory that every step writes anew, and that a captured CUDA graph may keep in use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

READ_ON = ("cpu",)
"""The types of devices whose memory the host reads without waiting."""


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


class Scratch:
    """Tensors by name, so that steps and new requests allocate none.

    The next use of a name writes its tensor anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, StepBuffer] = {}
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return an uninitialised tensor. A name always has the same dtype."""
        taken = self._taken.get(name)
        if taken is None or taken.shape != shape:
            if name not in self._buffers:
                self._buffers[name] = StepBuffer(1, dtype, self._device)
            with torch.inference_mode(False):  # the next use may be outside of it
                taken = self._buffers[name].take(math.prod(shape)).view(shape)
            self._taken[name] = taken
        return taken

    def pick(self, name: str, table: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        """Return what a table holds at these places, int64 [B], of one of its axes."""
        shape = [*table.shape]
        shape[dim] = len(index)
        return torch.index_select(table, dim, index, out=self.take(name, table.dtype, *shape))

    def send(self, name: str, values: Tensor) -> Tensor:
        """Return numbers of the host on the device. Where that is the host they are not copied."""
        if values.device == self._device:
            return values
        return self.take(name, values.dtype, *values.shape).copy_(values)


def capturing(device: torch.device) -> bool:
    """Return whether this step is being captured, so that the host must not read the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def readable(device: torch.device) -> bool:
    """Return whether the host reads the memory of a device without waiting for it."""
    return device.type in READ_ON
