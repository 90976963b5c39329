"""The sections of the GPU check: how long each may take, what it runs, and its rehearsal."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab.shapes import SHAPES, Shape

TOTAL_SECONDS = 560.0
"""Of a command that has ten minutes: the last archive is written within seconds after it."""


class Section(NamedTuple):
    """How long a section may take, and how long it took on an H100, or is expected to."""

    limit_s: float
    expected_s: float


# Kernels are compiled before anything else, then what is right or wrong is told, then times. Those
# with goals (`goals.py`) come first. A benchmark compares its own ids with the oracle before it
# times them.
SECTIONS = {
    "environment": Section(90, 8),
    "compile": Section(100, 56),
    "goldens": Section(50, 9),
    "oracle": Section(60, 14),
    "features": Section(140, 95),
    "virtual_ranks": Section(60, 17),
    "invariance": Section(50, 7),
    "tiles": Section(70, 14),
    "noise": Section(45, 8),
    "processes": Section(90, 40),
    "tune": Section(330, 0),
    "single_gpu": Section(130, 35),
    "shard": Section(75, 16),
    "filters": Section(80, 40),
    "screened": Section(60, 15),
    "kinds": Section(150, 60),
    "kernel_times": Section(90, 30),
    "ceilings": Section(45, 7),
    "exchange": Section(30, 7),
}

SIDE_BY_SIDE = (
    "goldens", "oracle", "features", "virtual_ranks", "invariance", "tiles", "noise", "processes",
)  # fmt: skip
"""They time nothing, so they may share a GPU, and stand one after the other in `SECTIONS`."""

ON_REQUEST = ("tune", "kinds", "kernel_times")
"""Left out unless they are named, because they take minutes."""
POINTS: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "ceilings": (SHAPES[:2], ()),
    "tune": (SHAPES[:2], (16, 64, 128, 256)),
    "single_gpu": (SHAPES[:2], (16, 32, 64, 128, 256, 1, 512)),
    "shard": (SHAPES[:2], (16, 32, 64, 1, 256)),
    "filters": (SHAPES[1:2], (64, 1)),
    "screened": (SHAPES[:2], (16, 1)),
    "kinds": (SHAPES[1:2], (64, 1)),
    "exchange": (SHAPES[:1], (64,)),
}
"""Shapes and batches of the sections that are benchmarks."""
REHEARSED = ("goldens", "oracle", "features", "virtual_ranks", "invariance", "tiles")
"""Sections that say right or wrong and launch kernels of the package, each one part."""

REPEATS = 30
_SPARE_SECONDS = 35.0
"""A benchmark begins no point this close to its limit, or in the last third of a short one."""
_COMPILE_SPARE_SECONDS = 5.0
_MOST_COMPILERS = 12


def run_section(name: str, dry_run: bool, output: Path, until: float) -> Iterator[dict[str, Any]]:
    """Yield what section `name` finds, as soon as it has it; raises if something is wrong.

    Args:
        name: of `SECTIONS`, or the sections to compile for, such as "compile:shard,filters".
        until: the `time.time()` at which it will be killed.
    """
    from benchmarks.gpu import numerics
    from benchmarks.lab import machine

    if name in POINTS:
        yield from _benchmark(name, dry_run, output, until)
        return
    device = numerics.device_of(dry_run)
    if name == "environment":
        yield machine.describe(device)
    elif name.startswith("compile"):
        chosen = name.partition(":")[2].split(",") if ":" in name else list(SECTIONS)
        yield _compile(chosen, device, dry_run, until)
    else:
        yield from checks(name)(device, dry_run)


def checks(name: str) -> Any:
    """Return the section `name` that is no benchmark: a function of device and `dry_run`."""
    from benchmarks.gpu import features, kernel_times, numerics, processes

    sections = (
        *(numerics.noise, numerics.goldens, numerics.oracle, numerics.invariance, numerics.tiles),
        *(processes.virtual_ranks, processes.processes, features.features),
        kernel_times.kernel_times,
    )
    return {section.__name__: section for section in sections}[name]


def run_of(name: str, dry_run: bool, device: Any) -> Any:
    """Return the `Run` of a benchmark: its shapes and batches, or tiny ones."""
    from benchmarks.lab.harness import Run
    from tpsample.distributed import Job

    if dry_run:
        return Run.small(Job(device=device), batches=(2,), repeats=2)
    shapes, batches = POINTS[name]
    return Run(Job(device=device), shapes=shapes, batches=batches, repeats=REPEATS)


def _benchmark(name: str, dry_run: bool, output: Path, until: float) -> Iterator[dict[str, Any]]:
    """Yield the folder of the result, and at the end what it has beside its rows.

    The rows of a point are told when it is measured, so that none is lost with a folder.
    """
    from benchmarks.gpu.numerics import device_of
    from benchmarks.gpu.record import tell
    from benchmarks.lab import machine
    from benchmarks.lab.harness import execute
    from benchmarks.lab.results import RESULT
    from benchmarks.questions import BENCHMARKS

    run = run_of(name, dry_run, device_of(dry_run))
    folder = output / machine.folder_name(name, machine.describe(run.device))
    yield {"folder": folder.name}
    seconds = until - min(_SPARE_SECONDS, SECTIONS[name].limit_s / 3) - time.time()
    result = execute(
        BENCHMARKS[name],
        run,
        folder / RESULT,
        on_rows=lambda rows: tell({"rows": rows}),
        seconds=seconds,
    )
    yield {**result.checks, **result.measured}


def rehearsals(dry_run: bool) -> dict[str, Callable[[Any], object]]:
    """Return what can be rehearsed at once: sections, and each shape and batch of a benchmark."""
    found: dict[str, Callable[[Any], object]] = {}
    # The last one has the most baselines to compile, so it begins first.
    for name, (shapes, batches) in reversed(POINTS.items()):
        rehearsed = partial(_rehearsed_benchmark, name, dry_run)
        if dry_run or not batches:
            found[name] = rehearsed
            continue
        for shape, batch in itertools.product(shapes, batches):
            found[f"{name} {shape.name} {batch}"] = partial(
                rehearsed, shapes=(shape,), batches=(batch,)
            )
    return found | {name: partial(_rehearsed_check, name, dry_run) for name in REHEARSED}


def _rehearsed_benchmark(name: str, dry_run: bool, device: Any, **sizes: Any) -> None:
    from benchmarks.questions import BENCHMARKS

    run = replace(run_of(name, dry_run, device), **sizes)
    deque(BENCHMARKS[name].rows(run), maxlen=0)


def _rehearsed_check(name: str, dry_run: bool, device: Any) -> None:
    from benchmarks.lab.launches import filled

    with filled():
        deque(checks(name)(device, dry_run), maxlen=0)


def _compile(chosen: list[str], device: Any, dry_run: bool, until: float) -> dict[str, Any]:
    """Rehearse these sections and compile their launches; what is not done in time is named.

    A dry run rehearses in its own process and compiles nothing, because the interpreter does not.
    """
    from benchmarks.gpu import precompile
    from tpsample.core.machine import interpreted

    parts = {n: each for n, each in rehearsals(dry_run).items() if n.split()[0] in chosen}
    if interpreted():
        launches = [precompile.rehearse(part, device)[0] for part in parts.values()]
        return {"launches": len({each for part in launches for each in part}), "compiled": 0}
    end = until - _COMPILE_SPARE_SECONDS
    workers = min(_MOST_COMPILERS, len(os.sched_getaffinity(0)))
    return precompile.compile_parts(parts, device, end, workers)
