"""Whether kernels may overlap: the next one starts while the one before ends, and reads ahead."""

from __future__ import annotations

from functools import cache

import torch

from tpsample.core.interpreted import interpreted

OVERLAP_ARCH = 90
"""Compute capability × 10 from which programmatic dependent launch and bulk prefetch exist."""


@cache
def kernels_overlap(device: torch.device) -> bool:
    """Return whether the kernels on a device may."""
    if device.type != "cuda" or interpreted():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= OVERLAP_ARCH
