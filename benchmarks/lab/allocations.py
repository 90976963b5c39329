"""Counts what a step calls, allocates and waits for beside its kernels.

    with Operators() as operators:
        out = sampler(hidden_states, rows, positions, out=out)
    assert not operators.made

Kernels are left out, because the interpreter computes with tensors too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks.lab.launches import listed
from benchmarks.lab.timing import waits_raise

VIEWS = ("slice", "select", "view", "detach", "squeeze", "transpose")
"""Operators that only make another view of a tensor: they neither allocate nor launch."""


class Operators(TorchDispatchMode):
    """Notes the operators of torch that are called outside of kernels, views aside.

    Args:
        device_type: of the results that count as allocated; None counts all.

    Attributes:
        called: names, such as "aten.fill_.Scalar".
        made: those that allocate, because none of their arguments holds a result.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self.called: list[str] = []
        self.made: list[str] = []

    def __enter__(self) -> Operators:
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
        if func.overloadpacket.__name__ not in VIEWS:
            self.called.append(str(func))
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


def noise_on_gpu(step: Callable[[], object]) -> str:
    """Count what a step allocates; raises where the host waits for the device."""
    torch.cuda.synchronize()
    with waits_raise():
        allocations = allocated_on_gpu(step)
    return f"{allocations} allocations" if allocations else ""


def allocated_on_gpu(step: Callable[[], object]) -> int:
    """How often a step takes memory of the GPU."""
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[name]
    step()
    return int(torch.cuda.memory_stats()[name]) - int(before)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes more than before are held at the worst moment of a step.

    The results of the step count. On a CPU torch's profiler notes what is taken and given back; a
    buffer of a library below torch is not seen.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    del result
    return max(accumulate((e.nbytes() for e in events if e.name() == "[memory]"), initial=0))


def noise_on_cpu(step: Callable[[], object]) -> str:
    """Return the operators of torch that a step calls beside its kernels, which are not run.

    Those that count failed rows on the host are left out.
    """
    with Operators() as operators, listed():
        step()
    counted = ("aten.count_nonzero.default", "aten._local_scalar_dense.default")
    return ", ".join(name for name in operators.called if name not in counted)
