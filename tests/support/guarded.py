"""Tensors between pages of memory that no process may touch, so that an access beside one kills it.

    guard page | fill … | tensor | guard page        or        guard page | tensor | fill … | guard

The fill is NaN in every floating dtype and -1 in integers, so that what is read of it by mistake
changes a result, even where it does not reach the guard page.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.random_heads import ModelHead

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor, *, at_end: bool = True) -> Tensor:
    """Return a contiguous copy of a tensor that ends, or begins, at a guard page."""
    if not tensor.numel():
        return tensor
    size = tensor.nbytes
    room = -(-size // PAGE) * PAGE
    whole = room + 2 * PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _libc.mmap(None, whole, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
    for guard in (start, start + PAGE + room):
        assert _libc.mprotect(guard, PAGE, 0) == 0
    ctypes.memset(start + PAGE, 0xFF, room)
    begin = start + PAGE + (room - size if at_end else 0)
    memory = (ctypes.c_byte * size).from_address(begin)
    weakref.finalize(memory, _libc.munmap, start, whole)
    with torch.inference_mode(False):
        found = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        return found.copy_(tensor.detach())


def guarded_take(scratch: object, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Twin of `Scratch.take`: every shape of a name has guarded memory of its own."""
    kept = vars(scratch).setdefault("guarded", {})
    if (name, shape) not in kept:
        with torch.inference_mode(False):
            kept[name, shape] = guarded(torch.full(shape, -1, dtype=dtype, device="cpu"))
    return kept[name, shape]


@dataclass(frozen=True)
class GuardedHead(ModelHead):
    """An LM head whose weight, bias, hidden states and given logits are guarded.

    Attributes:
        at_end: whether they end at guard pages; else they begin there.
    """

    at_end: bool = True

    def placed(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return guarded(tensor, at_end=self.at_end)
        rows, columns = tensor.shape[:-1], tensor.shape[-1]
        wide = torch.empty(*rows, columns + 3, dtype=tensor.dtype, device="cpu")
        wide[..., :columns] = tensor.detach()
        return guarded(wide, at_end=self.at_end)[..., :columns]
