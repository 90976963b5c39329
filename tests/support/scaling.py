"""Records of scaling runs: made up, or to be measured in milliseconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks import machine
from benchmarks.results import row, with_ratios
from benchmarks.scaling.candidates import MODES, STORED, TPSAMPLE
from benchmarks.scaling.record import Point, Record, Settings
from benchmarks.shapes import TINY
from benchmarks.timing import Timing

QUIET = {"load": [0.0, 0.0, 0.0], "busy_cores": 0.0, "gpu_percent": []}


def settings(**changes: Any) -> Settings:
    """One rank and two, one tiny shape, two batch sizes, plain requests."""
    values: dict[str, Any] = {
        "world_sizes": (1, 2),
        "shapes": (TINY.name,),
        "batches": (1, 3),
        "modes": ("plain",),
        "repeats": 1,
        "threads": 1,
        "tiny": True,
    }
    return Settings(**(values | changes))


def unmeasured(**changes: Any) -> Record:
    """A record of nothing yet, on this machine."""
    return Record(machine.describe(torch.device("cpu"), 2), settings(**changes))


def made_up(ours_us: float = 10.0, **changes: Any) -> Record:
    """A complete record: tpsample takes `ours_us`, all-to-all 20 µs, all-gather 30."""
    record = unmeasured(**{"modes": tuple(MODES), "tiny": False, **changes})
    record.machine |= {"cpu_cores": 2, "hardware": "NVIDIA Made Up"}
    record.sessions = [
        {"started": "then", "ended": "later", "command": "this", "before": QUIET, "after": QUIET}
    ]
    for world_size in record.settings.world_sizes:
        record.points += [_point(point, ours_us) for point in record.settings.points(world_size)]
    return record


def _point(point: Point, ours_us: float) -> dict[str, Any]:
    timed = [("tpsample", TPSAMPLE, "tpsample", ours_us, 8 * (point.world_size - 1) * point.batch)]
    ways = ["all-gather", "all-to-all"] if point.world_size > 1 else [STORED]
    for way in ways:
        slowest_us = 30.0 if way == "all-gather" else 20.0
        timed.append((f"{way} + race", way, "baseline", slowest_us, 2000 * point.batch))
        timed.append((f"{way} + slow", way, "baseline", 9 * slowest_us, 2000 * point.batch))
    rows = with_ratios(
        [
            {**row(name, kind, Timing((us, us, us), True)), "family": family, "bytes_sent": sent}
            for name, family, kind, us, sent in timed
        ]
    )
    for each in rows:
        each["tokens_per_s"] = point.batch / each["median_us"] * 1e6
    checks = {"rows_compared": point.batch, "near_ties": 0, "largest_gap": 0.0}
    return {**asdict(point), "rows": rows, "left_out": [], "checks": checks, "seconds": 1.0}
