"""Names the parts of a step in a profile, and costs next to nothing while nobody records one.

`torch.profiler.profile` shows the ranges by name. Under `torch.autograd.profiler.emit_nvtx` they
are ranges of NVTX, which Nsight Systems shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")

RANGES = ("head", "exchange", "filters", "verification")
"""Their names, behind "tpsample: "."""


def ranged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes each call a range of the profile that is recorded."""
    assert name in RANGES

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def recorded(*args: P.args, **named: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:  # a range takes the host 10 µs
                return call(*args, **named)
            with profiler.record_function(f"tpsample: {name}"):
                return call(*args, **named)

        return recorded

    return decorate
