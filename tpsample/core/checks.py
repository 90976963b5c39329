"""Checks of single values. Each message names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor


def check_current(device: torch.device) -> None:
    """Kernels are launched on the current device of the process."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"lm_head_weight: is on {device}, but the current device of this process is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device first"
        )


def require_plain(name: str, value: object) -> None:
    """A DTensor is a tensor by type; its part on this rank is what is wanted."""
    if type(value).__name__ == "DTensor":
        raise TypeError(f"{name}: got a DTensor; pass its part on this rank, {name}.to_local()")


def check_int(name: str, value: int, low: int, high: int) -> int:
    """An int within bounds, returned."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an int from {low} to {high}, got {value!r}")
    return value


def describe(value: object) -> str:
    """What came, for a message."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)
