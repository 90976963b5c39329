"""State that outlives a call consists of ordinary tensors, also where inference mode is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

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
