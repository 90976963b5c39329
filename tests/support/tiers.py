"""Tests that run by default, in minutes, tests that `make soak` adds, and the order of tests."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice, product
from typing import Any, TypeVar

import pytest

_Item = TypeVar("_Item")


def long(*cases: Any) -> list[Any]:
    """Cases of `parametrize` that the default run leaves out; a tuple is one case."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=pytest.mark.long) for each in values]


def thinned(*axes: Iterable[Any], one_in: int, also: Container[tuple[Any, ...]] = ()) -> list[Any]:
    """All combinations as cases of `parametrize`; the default run takes one in so many.

    It takes those whose places add up to a multiple, so that it has each value of each axis. It has
    each pair of two axes, too, where a third one has at least `one_in` values; and it takes `also`.
    """
    cases = list[Any]()
    for each in product(*map(enumerate, axes)):
        places, case = zip(*each, strict=True)
        kept = sum(places) % one_in == 0 or case in also
        cases += [case] if kept else long(case)
    return cases


def heavy_first(items: Sequence[_Item], heavy: Sequence[_Item], workers: int) -> list[_Item]:
    """Return the items in an order in which every worker begins with its part of the heavy ones.

    pytest-xdist gives each worker a run of neighbours. So a heavy test near the end of the list
    would begin when the other workers have little left to take over.
    """
    others = iter([item for item in items if item not in heavy])
    found: list[_Item] = []
    for worker in range(workers):
        own = heavy[worker::workers]
        size = (len(items) - len(found)) // (workers - worker)  # as xdist's worksteal divides
        found += [*own, *islice(others, max(0, size - len(own)))]
    return found
