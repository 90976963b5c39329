"""The sections of `gpu_check`: how long each may take, what it measures, and how it is run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES, Shape

TOTAL_SECONDS = 510.0


class Section(NamedTuple):
    """How long a section may take, and how long it is expected to take on an H200.

    The expectation is an estimate from counts of kernels and points, not a measurement.
    """

    limit_s: float
    expected_s: float


# Kernels are compiled before anything is timed, and the sections with goals (`gpu_goals`) come
# first. A benchmark compares its own ids with the oracle before it times them. The sections that
# come after `tune` use the tiles that it found.
SECTIONS = {
    "environment": Section(90, 8),
    "compile": Section(100, 55),
    "goldens": Section(50, 10),
    "oracle": Section(60, 12),
    "tune": Section(330, 0),
    "single_gpu": Section(130, 90),
    "shard": Section(75, 33),
    "filters": Section(80, 60),
    "screened": Section(60, 25),
    "features": Section(100, 50),
    "ceilings": Section(45, 20),
    "virtual_ranks": Section(60, 25),
    "invariance": Section(50, 8),
    "tiles": Section(70, 20),
    "noise": Section(45, 15),
    "exchange": Section(30, 7),
    "epilogue": Section(30, 7),
    "processes": Section(60, 30),
}
ON_REQUEST = ("tune",)
"""Left out unless it is named: it takes minutes, and writes the table that the sampler reads."""

BENCHMARKS: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "ceilings": (SHAPES[:2], ()),
    "single_gpu": (SHAPES[:2], (16, 32, 64, 128, 256, 1, 512)),
    "shard": (SHAPES[:2], (16, 32, 64, 1, 256)),
    "filters": (SHAPES[1:2], (64, 1)),
    "screened": (SHAPES[:2], (16, 1)),
    "epilogue": (SHAPES[:2], (64,)),
    "exchange": (SHAPES[:1], (64,)),
}
TUNED: tuple[tuple[Shape, ...], tuple[int, ...], tuple[int, ...]] = (
    SHAPES[:2],
    (16, 64, 128, 256),
    (8, 1),
)
"""Shapes, batches and numbers of shards of the section `tune`."""

REPEATS = 30
_SPARE_SECONDS = 35.0
"""A benchmark begins no point this close to its limit, or in the last third of a short one."""


def run_section(name: str, dry_run: bool, output: Path, until: float) -> Iterator[dict[str, Any]]:
    """Yield what section `name` finds, as soon as it has it; raises if something is wrong.

    Args:
        name: of `SECTIONS`, or one part of the tiles, such as "tiles:0/6", or what to compile for,
            such as "compile:shard,filters".
        until: the `time.time()` at which it will be killed.
    """
    from benchmarks import gpu_compile, gpu_numerics, gpu_tune, machine

    if name in BENCHMARKS:
        yield from _benchmark(name, dry_run, output, until)
        return
    device = gpu_numerics.device_of(dry_run)
    if name == "environment":
        yield machine.describe(device)
    elif name.startswith("compile"):
        sections = name.partition(":")[2].split(",") if ":" in name else list(SECTIONS)
        yield gpu_compile.compile_all(sections, device, dry_run, until)
    elif name == "tune":
        yield from gpu_tune.tune_shapes(device, dry_run, output, until)
    else:
        yield from checks(name)(device, dry_run)


def checks(name: str) -> Any:
    """The section `name` that says right or wrong: a function of the device and `dry_run`."""
    from benchmarks import gpu_features, gpu_numerics, gpu_ranks

    if name.startswith("tiles"):
        part, parts = map(int, (name.partition(":")[2] or "0/1").split("/"))
        return lambda device, dry_run: gpu_numerics.tiles(device, dry_run, part, parts)
    sections = (
        gpu_numerics.noise,
        gpu_numerics.goldens,
        gpu_numerics.oracle,
        gpu_numerics.invariance,
        gpu_ranks.virtual_ranks,
        gpu_ranks.processes,
        gpu_features.features,
    )
    return {section.__name__: section for section in sections}[name]


def run_of(name: str, dry_run: bool, job: Any) -> Any:
    """The `Run` of a benchmark, or of `tune`: its shapes and batches, or tiny ones."""
    from benchmarks.harness import Run

    if dry_run:
        return Run.small(job, batches=(2,), repeats=2)
    shapes, batches = TUNED[:2] if name == "tune" else BENCHMARKS[name]
    return Run(job, shapes=shapes, batches=batches, repeats=REPEATS)


def _benchmark(name: str, dry_run: bool, output: Path, until: float) -> Iterator[dict[str, Any]]:
    """Yield the folder of the result, and at the end what it has beside its rows.

    Every row is told when it is measured, so that none is lost with a folder.
    """
    from benchmarks import gpu_numerics, machine
    from benchmarks.gpu_record import tell
    from benchmarks.harness import execute
    from benchmarks.report import RESULT
    from tpsample.distributed import Job

    run = run_of(name, dry_run, Job(device=gpu_numerics.device_of(dry_run)))
    record = machine.describe(run.device)
    folder = output / f"{name}-{machine.slug(record)}-{record['date']}"
    yield {"folder": folder.name}
    spare = min(_SPARE_SECONDS, SECTIONS[name].limit_s / 3)
    seconds = until - spare - time.time()
    result = execute(
        name, run, folder / RESULT, on_row=lambda row: tell({"rows": [row]}), seconds=seconds
    )
    yield {**result.checks, **result.measured}
