"""The sections of `gpu_check`: how long each may take, what it measures, and how it is run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, Shape

# Section: seconds it may take. In order of importance within what is left of the total. Kernels
# are compiled before anything is timed. The speeds come early, since a benchmark compares its own
# ids with the oracle before it times them; what is tuned before them is used by them.
SECTIONS = {
    "environment": 90,
    "compile": 100,
    "goldens": 50,
    "oracle": 60,
    "ceilings": 45,
    "tune": 330,
    "single_gpu": 170,
    "shard": 90,
    "screened": 70,
    "features": 60,
    "noise": 45,
    "virtual_ranks": 60,
    "invariance": 50,
    "tiles": 70,
    "epilogue": 45,
    "exchange": 45,
    "filters": 45,
    "processes": 60,
}
ON_REQUEST = ("tune",)
"""Left out unless it is named: it takes minutes, and writes the table that the sampler reads."""

BENCHMARKS: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "ceilings": (SHAPES[:2], ()),
    "single_gpu": (SHAPES[:2], (1, 16, 64, 128, 256)),
    "shard": (SHAPES[:2], (1, 16, 64, 256)),
    "screened": (SHAPES[:2], (1, 16, 64)),
    "epilogue": (SHAPES[:2], (1, 64, 256)),
    "exchange": (SHAPES[:2], (1, 64, 256)),
    "filters": (SHAPES[1:2], (1, 64)),
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


def run_section(name: str, dry_run: bool, output: Path, until: float) -> dict[str, Any]:
    """What section `name` found; raises if something is wrong.

    Args:
        name: of `SECTIONS`, or one part of the tiles, such as "tiles:0/6", or what to compile for,
            such as "compile:shard,filters".
        until: the `time.time()` at which it will be killed.
    """
    from benchmarks import gpu_compile, gpu_numerics, gpu_tune, machine

    if name in BENCHMARKS:
        return _benchmark(name, dry_run, output, until)
    device = gpu_numerics.device_of(dry_run)
    if name == "environment":
        return machine.describe(device)
    if name.startswith("compile"):
        sections = name.partition(":")[2].split(",") if ":" in name else list(SECTIONS)
        return gpu_compile.compile_all(sections, device, dry_run, until)
    if name == "tune":
        return gpu_tune.tune_shapes(device, dry_run, output, until)
    return checks(name)(device, dry_run)


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


def _benchmark(name: str, dry_run: bool, output: Path, until: float) -> dict[str, Any]:
    from benchmarks import gpu_numerics, machine
    from benchmarks.harness import execute
    from benchmarks.report import RESULT, write_report
    from tpsample.distributed import Job

    run = run_of(name, dry_run, Job(device=gpu_numerics.device_of(dry_run)))
    record = machine.describe(run.device)
    folder = output / f"{name}-{machine.slug(record)}-{record['date']}"
    spare = min(_SPARE_SECONDS, SECTIONS[name] / 3)
    try:
        result = execute(name, run, folder / RESULT, seconds=until - spare - time.time())
    finally:
        if (folder / RESULT).exists():
            write_report(folder)
    return {"rows": len(result.rows), "folder": folder.name, **result.checks, **result.measured}
