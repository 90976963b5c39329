"""Checks of single values. A message names the argument, what was expected and what came."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, NoReturn, SupportsInt, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tpsample.core.tensors import bytes_of, readable

INDICES = (torch.int32, torch.int64)
"""The dtypes of what names rows or counts them."""

_LONGEST = 80
"""Characters of a value that a message shows."""


_PLAIN = Tensor, torch.nn.Parameter
"""The classes whose numbers lie in their own memory."""


def check_current(name: str, device: torch.device) -> None:
    """Raise a ValueError unless the device is the process's current one, where kernels start."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{name}: is on {device}, but the current device of this process is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device first"
        )


def text_of(error: BaseException) -> str:
    """Return what an exception says, or its type where it says nothing."""
    return str(error).strip() or type(error).__name__


def kind_and_text(error: BaseException) -> str:
    """Return the type of an exception, and what it says."""
    return f"{type(error).__name__}: {error}".strip().removesuffix(":")


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without an import that only its users need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_batch(tensor: Tensor) -> bool:
    """Return whether a gradient stands for several, as with autograd's `is_grads_batched`."""
    return bool(is_legacy_batchedtensor(tensor))


def require_plain(name: str, value: object) -> None:
    """Raise unless a value is a plain tensor of this rank, with numbers that can be read now.

    Hidden states are the same on every rank, so the part of a sequence that a rank holds is wrong.

    Raises:
        TypeError: a DTensor.
        ValueError: a sparse or a nested tensor.
        RuntimeError: a tensor of a call that torch records, such as make_fx, or maps, such as vmap.
    """
    if type(value) not in _PLAIN and is_dtensor(value):
        whole = name == "hidden_states"
        what = "the whole of it, the same on every rank" if whole else "its part on this rank"
        call = "full_tensor" if whole else "to_local"
        raise TypeError(f"{name}: got a DTensor; pass {what}, {name}.{call}()")
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
        _refuse_layout(name, value)
    by = "FakeTensorMode" if type(value).__name__ == "FakeTensor" else None
    if peek_interpreter_stack() is not None:
        by = "a transform of torch.func, such as vmap"
    elif torch._C._get_tracing_state() is not None:
        by = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack():
        modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
        by = next((recorder for mode, recorder in _RECORDERS.items() if mode in modes), by)
    if by is not None:
        raise RuntimeError(
            f"{name}: has no numbers of its own inside {by}, and this call reads them; make "
            "it outside, or inside torch.compile"
        )


def _refuse_layout(name: str, tensor: Tensor) -> NoReturn:
    """Raise a ValueError for a tensor whose numbers do not lie at its strides."""
    kind, way_out = f"one of layout {tensor.layout}", ".to_dense()"
    if tensor.is_nested:
        kind, way_out = "a nested one", ".to_padded_tensor(0)"
    raise ValueError(f"{name}: expected a dense tensor, got {kind}; pass {name}{way_out}")


def require_memory(name: str, tensor: Tensor) -> None:
    """Raise a ValueError unless the numbers of a tensor lie in its memory, where kernels read them.

    FSDP frees that of parameters between calls, and torch may put off to negate what is in it.
    Tensors of other classes, such as quantised ones, may keep their numbers in tensors inside.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        _refuse_layout(name, tensor)
    numbers = tensor.numel()
    if not numbers:
        return
    is_plain = type(tensor) in _PLAIN
    if is_plain and tensor.is_neg():
        raise ValueError(
            f"{name}: torch has put off to negate its numbers, which are those of another tensor; "
            "call .resolve_neg()"
        )
    if is_plain:
        if not tensor.is_contiguous():
            ends = zip(tensor.shape, tensor.stride(), strict=True)
            numbers = 1 + sum((size - 1) * step for size, step in ends)
        needed = (tensor.storage_offset() + numbers) * tensor.itemsize
        has = tensor.untyped_storage().nbytes()
        if has < needed:
            raise ValueError(
                f"{name}: its storage has {has} of {needed} bytes; give it its numbers back before "
                "the call, as FSDP's summon_full_params does"
            )
    if not (tensor.data_ptr() or tensor.is_meta):
        raise ValueError(
            f"{name}: expected a tensor with its numbers in its own memory, got a "
            f"{type(tensor).__name__} without memory; pass a plain tensor of these numbers"
        )


_RECORDERS = {"FakeTensorMode": "FakeTensorMode", "ProxyTorchDispatchMode": "make_fx"}
"""By torch's class of what takes its calls, the name that a user knows."""


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return an integer within bounds as an int; raise a ValueError for anything else."""
    if not is_integer(value) or not low <= int(value) <= high:
        raise ValueError(f"{name}: expected an int from {low} to {high}, got {describe(value)}")
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ValueError unless a value is one of several."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        expected = ", ".join(map(str, choices))
        raise ValueError(f"{name}: expected one of {expected}, got {describe(value)}")


def is_integer(value: object) -> TypeGuard[SupportsInt]:
    """Return whether a value is an integer of Python, NumPy or torch (0-dimensional), no bool."""
    if type(value) is int:  # asking an abstract class takes twenty times as long
        return True
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and not value.is_complex()
        return value.ndim == 0 and whole and value.dtype != torch.bool
    return isinstance(value, Integral) and not isinstance(value, bool)


def real_number(value: Any) -> float:
    """Return a real number as a float; infinite if it is too large, NaN if it is no number."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def way_to_float(value: Any) -> str:
    """Return the end of a message on what is no real number but converts to one, "" for others."""
    if isinstance(value, Real):
        return ""
    try:
        converts = math.isfinite(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return ""
    return "; give float(…) of it" if converts else ""


def as_fp32(value: float) -> float:
    """Return the fp32 number that a float becomes; infinite if it is too large."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def is_listing(value: object) -> bool:
    """Return whether a value lists others, which a text, a mapping and a 0-d tensor do not."""
    return type(value) in (list, tuple) or (
        isinstance(value, Iterable)
        and not isinstance(value, (str, bytes, bytearray, Mapping))
        and getattr(value, "ndim", 1) != 0
    )


def lists_in_order(value: object) -> bool:
    """Return whether a value lists others in an order of the caller's, which a set does not."""
    return is_listing(value) and not isinstance(value, Set)


def fits(
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of one of these dtypes, of any float if there are none.

    A letter of the shape is any size.
    """
    if not isinstance(value, Tensor) or value.device != device or value.ndim != len(shape):
        return False
    for expected, size in zip(shape, value.shape, strict=True):
        if size != expected and not isinstance(expected, str):
            return False
    return value.dtype in dtypes if dtypes else value.is_floating_point()


def check_tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
    meaning: str = "",
) -> None:
    """Raise a ValueError unless a value `fits`.

    Args:
        meaning: text that a message has after the sizes.
    """
    if not fits(value, dtypes, shape, device):
        kinds = " or ".join(str(dtype).partition(".")[2] for dtype in dtypes)
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{name}: expected a tensor [{sizes}] of {kinds or 'any float'} on {device}{meaning}, "
            f"got {describe(value)}"
        )
    require_memory(name, value)


def describe(value: object) -> str:
    """Return how a message shows a value that came; a long one is cut."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no int of more than 4300 digits
        if not isinstance(value, int):
            return f"{type(value).__name__} with an int too long to show"
        return f"an int of {value.bit_length()} bits"
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {shorten(text)}"


def is_text(value: object) -> bool:
    """Return whether a value is a text of UTF-8, as bytes are not that came on a command line."""
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)


def shorten(text: str) -> str:
    """Return a text, or the beginning of one that is too long for a message."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} …"


def check_num_samples(num_samples: int | None) -> int:
    """Return the number of draws per row; None is one."""
    if num_samples is None:
        return 1
    return check_int("num_samples", num_samples, 1, 2**20)


def read_positions(positions: Tensor, batch: Any) -> bytes:
    """Return the positions of a CPU as bytes; none of a GPU, which is not waited for.

    Args:
        batch: of these rows. Positions of rows that are not drawn may be anything.

    Raises:
        ValueError: the position of a row that is drawn is below 0.
    """
    if not readable(positions.device):
        return b""
    position_bytes = bytes_of(positions)
    if not position_bytes[7::8].isascii():  # a sign is a high bit
        undrawn = batch._undrawn_rows
        drawn = positions if undrawn is None else positions.masked_fill(undrawn.rows, 0)
        if (lowest := int(drawn.min())) < 0:
            raise ValueError(
                f"positions: expected 0 <= position < 2^63, got {lowest}; pass the index of the "
                "token being generated, the number of tokens before it"
            )
    return position_bytes


def positions_tensor(
    positions: Tensor | int, rows: int, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """Return contiguous int64 [rows] from a tensor, or from one integer, which fills `out`."""
    if not isinstance(positions, Tensor) and is_integer(positions):
        positions = int(positions)
        if not 0 <= positions < 2**63:
            raise ValueError(f"positions: expected 0 <= position < 2^63, got {positions}")
        if out is None:
            out = torch.empty(rows, dtype=torch.int64, device=device)
        return out[:rows].fill_(positions)
    if isinstance(positions, Tensor) and positions.ndim == 0 and positions.dtype == torch.int64:
        positions = positions.expand(rows)
    if (
        not isinstance(positions, Tensor)
        or positions.dtype != torch.int64
        or positions.shape != (rows,)
        or positions.device != device
    ):
        raise ValueError(
            f"positions: expected an int or an int64 tensor [{rows}] on {device}, "
            f"got {describe(positions)}; a position is the index, in its sequence, of the token "
            "being generated: the number of tokens before it"
        )
    require_memory("positions", positions)
    return positions.contiguous()
