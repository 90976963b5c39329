"""A CUDA graph without a GPU: the operators of a call, run again at the same addresses.

    with Replays() as graph:
        out = sampler(hidden_states, rows, positions)
    hidden_states.copy_(others)
    graph.replay()                      # `out` holds what the operators make of it

As on a GPU, no line of Python runs in a replay, and every tensor stays where it was. A call that
asks the host for a value is refused while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import host_reads


class Replays(TorchDispatchMode):
    """Records every operator, with the very tensors that it took and made."""

    def __enter__(self) -> Replays:
        self._taken: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._refused = host_reads.refused()
        self._refused.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._refused.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self._taken.append((func, args, kwargs or {}, _tensors(made)))
        return made

    def replay(self) -> None:
        """Run them all again. The new tensors of an operator are written to the old ones."""
        with torch.no_grad():
            for func, args, kwargs, before in self._taken:
                made = _tensors(func(*args, **kwargs))
                for old, new in zip(before, made, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
