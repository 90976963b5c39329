"""NumPy arrays over the memory of tensors.

`Tensor.numpy` forbids that the tensor's storage is ever resized, although the tensor is the
caller's. An array that is made here leaves the storage as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}
"""How kernels read a dtype; see `tpsample.backends.numba_.kernels.numbers.as_fp32`."""
DTYPES = {dtype: np.dtype(kind) for dtype, kind in _KINDS.items()}
NONE = np.empty(0, np.int64)
"""The array that a kernel takes where rows have no such numbers."""


def arrays_of(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield arrays for tensors, of a copy where one has gaps, and all else as it is."""
    return (
        array_of(given.contiguous()) if isinstance(given, Tensor) else given for given in arguments
    )


_MEMORY: Any = ctypes.c_byte * 2**60
"""Memory of any size, because the array that is made over it knows its own."""


def array_of(tensor: Tensor) -> np.ndarray:
    """Return an array that shares the memory of a tensor on the host, and keeps the tensor."""
    shape, dtype, strides = tuple(tensor.shape), DTYPES[tensor.dtype], None
    if not tensor.numel():
        return np.empty(shape, dtype)
    if not tensor.is_contiguous():
        strides = tuple(step * dtype.itemsize for step in tensor.stride())
    memory = _MEMORY.from_address(tensor.data_ptr())
    memory.tensor = tensor  # which the array keeps, because its memory is the tensor's
    return np.ndarray(shape, dtype, memory, 0, strides)
