"""Results of scaling runs: made up, or to be measured in milliseconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.lab import machine
from benchmarks.lab.results import Result, Row, row, with_ratios
from benchmarks.lab.shapes import TINY
from benchmarks.lab.timing import Timing
from benchmarks.scaling import plan
from benchmarks.scaling.candidates import MODES, STORED, TPSAMPLE
from benchmarks.scaling.plan import Point, Settings

QUIET = {"load": [0.0, 0.0, 0.0], "busy_cores": 0.0, "gpu_percent": []}


def unmeasured(**changes: Any) -> Result:
    """A result of nothing yet, on this machine: one tiny shape, two batch sizes, plain requests."""
    values: dict[str, Any] = {
        "world_sizes": (1, 2),
        "shapes": (TINY.name,),
        "batches": (1, 3),
        "modes": ("plain",),
        "repeats": 1,
        "threads": 1,
        "tiny": True,
    }
    described = machine.describe(torch.device("cpu"), 2)
    return plan.unmeasured(described, Settings(**(values | changes)))


def made_up(ours_us: float = 10.0, **changes: Any) -> Result:
    """A complete result: tpsample takes `ours_us`, all-to-all 20 µs, all-gather 30."""
    result = unmeasured(**{"modes": tuple(MODES), "tiny": False, **changes})
    result.machine |= {"cpu_cores": 2, "hardware": "NVIDIA Made Up", "triton_interpreter": False}
    result.sessions = [
        {"started": "then", "ended": "later", "command": "this", "before": QUIET, "after": QUIET}
    ]
    settings = Settings.of(result)
    for world_size in settings.world_sizes:
        for point in settings.points(world_size):
            result.rows += _rows(point, ours_us)
    return result


def _rows(point: Point, ours_us: float) -> list[Row]:
    timed = [("tpsample", TPSAMPLE, "tpsample", ours_us, 8 * (point.world_size - 1) * point.batch)]
    ways = ["all-gather", "all-to-all"] if point.world_size > 1 else [STORED]
    for way in ways:
        slowest_us = 30.0 if way == "all-gather" else 20.0
        timed.append((f"{way} + race", way, "baseline", slowest_us, 2000 * point.batch))
        timed.append((f"{way} + slow", way, "baseline", 9 * slowest_us, 2000 * point.batch))
    rows = with_ratios(
        [
            {
                **row(name, kind, Timing((us, us, us), True), **asdict(point)),
                "family": family,
                "bytes_sent": sent,
                "fastest": not name.endswith("slow"),
            }
            for name, family, kind, us, sent in timed
        ]
    )
    for each in rows:
        each["tokens_per_s"] = point.batch / each["median_us"] * 1e6
    return rows
