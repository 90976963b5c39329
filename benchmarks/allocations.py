"""Which operators of torch allocate memory: those with a result that none of their arguments holds.

    with Allocations() as allocations:
        out = sampler(hidden_states, rows, positions, out=out)
    assert not allocations.made

Kernels are left out, because the interpreter computes with tensors too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Allocations(TorchDispatchMode):
    """Notes the names of such operators.

    Args:
        device_type: of the results that count; None counts all.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self.made: list[str] = []

    def __enter__(self) -> Allocations:
        self._kept = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]
        for kind, run in self._kept:
            kind.run = _outside(run)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for kind, run in self._kept:
            kind.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = {_storage(each) for each in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for each in _tensors(result):
            counts = self._device_type in (None, each.device.type)
            if counts and each.numel() and _storage(each) not in held:
                self.made.append(str(func))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _outside(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what launches a kernel without an eye on its operators."""

    def unseen(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return run(*args, **named)

    return unseen
