"""Catches what a captured CUDA graph cannot contain: the host reading a tensor, or sending one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tpsample.exchange

READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique")


class HostRead(AssertionError):
    """The host would have waited for the device, or copied from pageable memory."""


class _Reads(TorchDispatchMode):
    """Operators whose result the host needs, or whose shape depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        masks = (x for x in args[1] if x is not None) if name in ("index", "index_put_") else ()
        if name in READS or any(mask.dtype == torch.bool for mask in masks):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


class _Sends(TorchFunctionMode):
    """Tensors made from Python numbers, as an index or by name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "tolist", "item", "numpy"):
            raise HostRead(name)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, list) for each in index):
                raise HostRead(f"{name} with a list")
        return func(*args, **(kwargs or {}))


_lock, _replaced = threading.Lock(), contextlib.ExitStack()
_inside = 0
"""How many threads are inside `refused`; the first enters `_replaced`, the last closes it."""


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raise `HostRead` at the first of them. Products and failed rows are those of a GPU.

    Virtual ranks enter and leave it in any order.
    """
    global _inside
    with _lock:
        if _inside == 0:
            product = "tpsample.core.score.exact_products"
            _replaced.enter_context(patch(product, lambda h, weight: (h @ weight.T).float()))
            _replaced.enter_context(patch("tpsample.core.tensors.READ_ON", ()))
        _inside += 1
    try:
        with _Sends(), _Reads():
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _replaced.close()


def meet_on_devices() -> None:
    """As on GPUs: samplers of this process that are built later compare no steps on the host."""
    tpsample.exchange.SWAPS_ON = ()
