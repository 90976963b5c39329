"""Memory on a device that is used again and again, so that steps and new requests allocate none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpsample.core.step_buffer import StepBuffer


class Scratch:
    """Tensors by name; the next use of a name writes its tensor anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, StepBuffer] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return an uninitialised tensor. A name always has the same dtype."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = StepBuffer(1, dtype, self._device)
        return buffer.take(math.prod(shape)).view(shape)

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
