"""Records the traffic between ranks: every tensor that a collective is given, its largest axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter", "send", "recv"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "scatter", "isend", "irecv"),
)
"""Of torch.distributed."""
GROUP_METHODS = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send")
"""Of vLLM's `GroupCoordinator`; on a CPU they go through shared memory, past torch.distributed."""


@dataclass
class Count:
    """Of one collective: calls, bytes of the tensors it was given, and their largest axis."""

    calls: int = 0
    num_bytes: int = 0
    largest_axis: int = 0


class Traffic:
    """Counts from the moment it is made, by wrapping vLLM's `GroupCoordinator` and a module.

    Attributes:
        counts: by name of the collective.
    """

    def __init__(self, group_class: Any, module: Any = dist) -> None:
        self.counts: dict[str, Count] = {}
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._counting(name, getattr(module, name)))
        for name in GROUP_METHODS:
            method = self._counting(f"vLLM {name}", getattr(group_class, name))
            setattr(group_class, name, method)

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {name: asdict(count) for name, count in sorted(self.counts.items())}

    def _counting(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def counting(*args: Any, **kwargs: Any) -> Any:
            count = self.counts.setdefault(name, Count())
            count.calls += 1
            for tensor in tensors([*args, *kwargs.values()]):
                count.num_bytes += tensor.numel() * tensor.element_size()
                count.largest_axis = max(count.largest_axis, *tensor.shape, 0)
            return collective(*args, **kwargs)

        return counting


def tensors(values: Any) -> Iterator[Tensor]:
    """Return the tensors in arguments of a collective, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
