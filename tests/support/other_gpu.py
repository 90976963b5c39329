"""A tensor on a GPU that is not here."""

from __future__ import annotations

import torch
from torch import Tensor


class OnAnotherGpu(Tensor):
    """The shape, dtype and device of a tensor on cuda:1."""

    @staticmethod
    def __new__(cls, *shape: int, dtype: torch.dtype = torch.float32) -> OnAnotherGpu:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cuda:1")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is called")
