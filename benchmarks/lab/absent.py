"""A GPU that is not there: Triton compiles for it, and forgets every launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES = 227 * 1024
"""The shared memory of a program on an H200."""
AMD_ARCHS = (942, 950)
"""gfx942 is an MI300X or MI325X, gfx950 an MI350X or MI355X; 64 threads are one wave there."""


class AbsentGpu:
    """In place of Triton's driver of a GPU.

    Args:
        arch: of the GPU, such as 90, or one of AMD_ARCHS. It is its number too,
            because Triton keeps kernels by that.
    """

    utils = SimpleNamespace(
        load_binary=lambda *binary: (1, 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
    )

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch

    def take(self) -> None:
        """Have Triton compile for it, for good: a process has no other."""
        driver.set_active(self)

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Any:
        return lambda *launch: None

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        if self._arch in AMD_ARCHS:
            return GPUTarget("hip", f"gfx{self._arch}", 64)
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
