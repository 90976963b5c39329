"""Counts the kernels, operators and exchanges of a call on a GPU's plan, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

from torch import Tensor

from benchmarks.lab.allocations import Operators
from benchmarks.lab.launches import listed
from tpsample.ranks.ranks import Ranks


class Calls(NamedTuple):
    """The work of one call.

    Attributes:
        kernels: names of the kernels that it launched.
        operators: names of torch's operators that it called outside of kernels, views aside.
        exchanges: kinds, "gather" or "sum", of its exchanges of integers, and the bytes of a rank.
    """

    kernels: list[str]
    operators: list[str]
    exchanges: list[tuple[str, int]]

    @property
    def sent(self) -> int:
        """Bytes that a rank has for its peers, beside the words of a plain step."""
        return sum(nbytes for _, nbytes in self.exchanges)


@contextmanager
def exchanges() -> Iterator[list[tuple[str, int]]]:
    """List the exchanges of integers in the block."""
    found: list[tuple[str, int]] = []
    with ExitStack() as patches:
        for kind in ("gather", "sum"):
            patches.enter_context(patch.object(Ranks, f"{kind}_integers", _noting(kind, found)))
        yield found


def _noting(kind: str, found: list[tuple[str, int]]) -> Callable[[Ranks, Tensor], Tensor]:
    """Return the exchange of a kind, which notes its bytes."""
    exchange = getattr(Ranks, f"{kind}_integers")

    def noted(self: Ranks, own: Tensor) -> Tensor:
        found.append((kind, own.nbytes))
        return exchange(self, own)

    return noted


def counted(call: Callable[[], object]) -> Calls:
    """Call, and return what that did. Kernels run in the interpreter."""
    with exchanges() as found, listed(run_them=True) as launches, Operators() as operators:
        call()
    kernels = [
        launch.kernel.split(":")[1].removesuffix("_kernel")
        for launch, count in launches.items()
        for _ in range(count)
    ]
    return Calls(kernels, operators.called, found)
