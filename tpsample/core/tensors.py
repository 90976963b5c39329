"""Tensors of Python numbers, tensors that outlive a call, and memory that steps overwrite."""

from __future__ import annotations

import copy
import ctypes
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_KINDS = {
    torch.int64: "q",
    torch.int32: "i",
    torch.bool: "B",
    torch.float64: "d",
    torch.float32: "f",
}
"""By dtype, the type code of a Python array with the same bits."""


def tensors_of(
    *lists: Iterable[float], device: torch.device | str | None, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """Return each list of numbers or bools as a tensor; reals are rounded once."""
    tensors = []
    for values in lists:
        listed = array(_KINDS[dtype], values)
        if listed:
            on_host = torch.frombuffer(listed, dtype=dtype)
            tensors.append(on_host if device is None else on_host.to(device, non_blocking=True))
        else:  # which torch.frombuffer refuses
            tensors.append(torch.empty(0, dtype=dtype, device=device))
    return tensors


ALIGNED = 16
"""Rows of a tensor of columns come in multiples of it. So each column of 1, 4 or 8 bytes per row
begins at a multiple of 16 bytes. Triton compiles a kernel anew for a pointer that does not."""


def columns_of(rows: bytes, count: int, *, device: torch.device | str | None) -> Tensor:
    """Return the numbers of 8 bytes of some rows, one row after the other, by column: int64
    [count, rows], padded with zeros to a multiple of ALIGNED rows. It is one copy, however many
    columns there are."""
    given = len(rows) // (8 * count)
    padded = bytearray(rows) + bytes(8 * count * (max(1, given) + -max(1, given) % ALIGNED - given))
    by_row = torch.frombuffer(padded, dtype=torch.int64).view(-1, count)
    return by_row.T.contiguous().to(device, non_blocking=True)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def ordinary_tensors(function: _Function) -> _Function:
    """Return the function with inference mode off while it runs.

    It does what `torch.inference_mode(False)` does as a decorator, for a tenth of its 3 µs where
    inference mode is off already.
    """

    @wraps(function)
    def outside(*args: Any, **named: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **named)
        with torch.inference_mode(False):
            return function(*args, **named)

    return outside  # type: ignore[return-value]


def left_alone(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return a call of the function that torch.compile leaves out of its graph.

    With fullgraph=True the compiler refuses it and names it, so its name is the reason.
    """

    def called(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    called.__name__ = called.__qualname__ = (
        f"{reason}; leave fullgraph=True out, or call it outside"
    )
    # torch.compiler.disable, but for the import of the compiler, which takes a second
    left: Callable[..., Any] = torch._disable_dynamo(called)
    return left


def outside_of_graphs(function: _Function) -> _Function:
    """Return the function as one that runs outside of what torch.compile compiles.

    Where nothing is compiled the function is called directly. So no frame of torch lies between it
    and its caller, and warnings name the line of the caller.
    """
    unseen = left_alone(
        function, f"tpsample: {function.__qualname__} is no part of a graph of torch.compile"
    )

    @wraps(function)
    def made(*args: Any, **named: Any) -> Any:
        return (unseen if torch.compiler.is_compiling() else function)(*args, **named)

    return made  # type: ignore[return-value]


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the host. `Tensor.numpy` would mark its storage as fixed."""
    contiguous = tensor.contiguous()
    return ctypes.string_at(contiguous.data_ptr(), contiguous.nbytes) if contiguous.numel() else b""


READ_ON = ("cpu",)
"""The types of devices whose memory the host reads without waiting."""


class KeepsTensors:
    """Base of classes whose tensors later calls write to.

    Under inference mode `deepcopy` and `pickle` make tensors that no call outside of it may write
    to. So a copy that is made or loaded there is given others.
    """

    def __copy__(self: _Kept) -> _Kept:
        """Return a copy with its own tensors, because a change of shared tensors would leave the
        other object inconsistent with them."""
        return copy.deepcopy(self)

    @ordinary_tensors
    def __deepcopy__(self: _Kept, memo: dict[int, Any]) -> _Kept:
        made = memo[id(self)] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(vars(self), memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                state = copy.deepcopy(state, self._of_others(state))
        vars(self).update(state)

    def _of_others(self, state: dict[str, Any]) -> dict[int, Any]:
        """Return, by `id` of a part of a loaded state, the object that takes its place in the copy:
        the part itself, or that of another owner."""
        return {}


_Kept = TypeVar("_Kept", bound=KeepsTensors)


class HasViews(ABC):
    """Base of classes that keep views of their tensors. A pickle loses that tensors share memory,
    so a copy makes the views anew."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view()

    @abstractmethod
    def _view(self) -> None:
        """Make the tensors that are views of others."""


class Scratch:
    """Tensors by name, so that steps and new requests allocate none.

    The next use of a name overwrites its tensor. The memory grows by doubling. Outgrown memory is
    kept, because a captured CUDA graph may still write to it; it is never more than that in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return an uninitialised tensor. A name always has the same dtype."""
        taken = self._taken.get(name)
        if taken is None or taken.shape != shape:
            size = math.prod(shape)
            with torch.inference_mode(False):  # the next use may be outside of it
                memory = self._memory.get(name, torch.empty(0, dtype=dtype, device=self._device))
                if memory.numel() < size:
                    self._outgrown.append(memory)
                    memory = memory.new_empty(max(size, 2 * memory.numel()))
                    self._memory[name] = memory
                taken = self._taken[name] = memory[:size].view(shape)
        return taken

    def pick(self, name: str, table: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        """Return the entries of a table at these indices, int64 [B], of one axis."""
        shape = [*table.shape]
        shape[dim] = index.shape[0]  # `len` of a tensor takes three times as long
        return torch.index_select(table, dim, index, out=self.take(name, table.dtype, *shape))

    def send(self, name: str, values: Tensor) -> Tensor:
        """Return numbers of the host on the device. If that is the host, nothing is copied.

        The host does not wait for earlier work of the device, because pageable memory is staged
        before the copy returns.
        """
        if values.device == self._device:
            return values
        return self.take(name, values.dtype, *values.shape).copy_(values, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Return whether this step is being captured, so that the host must not read the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def readable(device: torch.device) -> bool:
    """Return whether the host reads the memory of a device without waiting for it."""
    return device.type in READ_ON
