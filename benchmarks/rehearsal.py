"""Which kernels does a section of `gpu_check` launch? A rehearsal runs it without any kernel.

The section's own code makes the launches, so there is no second list to keep. They are put on a
list and not made. Nothing is judged, because what the section computes is then nonsense: ids are
not compared, times are not taken.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from time import monotonic
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import baselines, gpu_sections, tile_read
from benchmarks.harness import Run, load
from benchmarks.launches import Launch, listed
from benchmarks.problem import Candidate, NearTies, Problem
from benchmarks.shapes import shape_named
from benchmarks.timing import Timing, one_line
from tpsample.distributed import Job

Step = Callable[[], object]
CHECKS = ("goldens", "oracle", "features", "virtual_ranks", "invariance", "tiles")
"""Sections that say right or wrong and launch kernels of the package, each one part."""

MOST_SECONDS = 40.0
"""A benchmark takes no point after this long."""


def parts(dry_run: bool) -> list[tuple[str, ...]]:
    """Return what can be rehearsed at once: sections, and each shape and batch of a benchmark.

    The section `tune` compiles by itself: it is seldom asked for.
    """
    found: list[tuple[str, ...]] = []
    # The last one has the most baselines to compile, so it begins first.
    for name, (shapes, batches) in reversed(gpu_sections.BENCHMARKS.items()):
        if dry_run or not batches:
            found.append((name,))
            continue
        found += [(name, shape.name, str(batch)) for shape in shapes for batch in batches]
    return found + [(name,) for name in CHECKS]


def rehearse(
    part: tuple[str, ...], device: torch.device, dry_run: bool
) -> tuple[list[Launch], str | None]:
    """Return the launches of one of `parts`, each once, and what ended its rehearsal early."""
    problem = None
    with listed() as launches, _nothing_is_judged():
        try:
            _run(part, device, dry_run)
        except AssertionError:
            pass  # a section that tries all and then says that something is wrong
        except Exception as error:
            problem = one_line(error)
    return list(launches), problem


def _run(part: tuple[str, ...], device: torch.device, dry_run: bool) -> None:
    name, *point = part
    if name in CHECKS:
        with _filled():
            deque(gpu_sections.checks(name)(device, dry_run), maxlen=0)
        return
    run = gpu_sections.run_of(name, dry_run, Job(device=device))
    if point:
        run.shapes, run.batches = (shape_named(point[0]),), (int(point[1]),)
    if name == "tune":
        tune = import_module("benchmarks.tune")  # it compiles first, by rehearsals of itself
        for _ in tune.tune(run, (int(point[2]),)):
            pass
        return
    start = monotonic()
    for _ in load(name).rows(run):
        if monotonic() - start > MOST_SECONDS:  # what is counted behind the times launches nothing
            break


@contextlib.contextmanager
def _nothing_is_judged() -> Iterator[None]:
    """Steps are called once, and whatever they return is right."""

    def check(self: Problem, *_: Any, **__: Any) -> NearTies:
        return NearTies()

    def time(self: Run, steps: Mapping[str, Step], *_: Any, **__: Any) -> dict[str, Timing]:
        for name, step in steps.items():
            try:
                step()
            except Exception as error:
                self.note(f"{name}: {one_line(error)}")
        return {name: Timing((1.0,), True) for name in steps}

    def time_checked(
        self: Run, candidates: dict[str, Candidate], others: Mapping[str, Step], *_: Any, **__: Any
    ) -> dict[str, Timing]:
        with _filled():
            times = self.time({name: each.step for name, each in candidates.items()})
        return {**times, **self.time(others)}

    def check_read(name: str, read: Step, words: Tensor) -> None:
        read()

    with (
        patch.object(Problem, "check", check),
        patch.object(Run, "time", time),
        patch.object(Run, "time_checked", time_checked),
        patch.object(baselines, "check_read", check_read),
        patch.object(tile_read, "check_read", check_read),
    ):
        yield


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Memory that no kernel has written is filled, so that loops over it go the same way each time.

    Not around baselines: what `torch.compile` keeps is kept for this mode alone.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
