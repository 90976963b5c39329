"""Results of scaling runs: made up, or to be measured in milliseconds."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.lab import harness
from benchmarks.lab.harness import Run
from benchmarks.lab.results import POINT, Result, Row, row, with_ratios
from benchmarks.lab.timing import Timing
from benchmarks.questions.scaling import benchmark
from benchmarks.questions.scaling_candidates import MODES, STORED, TPSAMPLE
from tpsample.distributed import Job

QUIET = {"load": [0.0, 0.0, 0.0], "busy_cores": 0.0, "gpu_percent": []}


def a_run(**changes: Any) -> Run:
    """One tiny shape, two batch sizes, plain requests; `changes` are of its fields and options."""
    options = {"world_sizes": [1, 2], "modes": ["plain"], "exchanges": ["auto"], "threads": 1}
    options |= {name: changes.pop(name) for name in options if name in changes}
    return Run.small(Job(world_size=2), **({"repeats": 1, "options": options} | changes))


def unmeasured(**changes: Any) -> Result:
    """A result of nothing yet, on this machine."""
    run = a_run(**changes)
    return harness.unmeasured(benchmark(run), run)


def made_up(ours_us: float = 10.0, **changes: Any) -> Result:
    """A complete result: tpsample takes `ours_us`, all-to-all 20 µs, all-gather 30."""
    result = unmeasured(**{"modes": list(MODES), "tiny": False, **changes})
    result.machine |= {"cpu_cores": 2, "hardware": "NVIDIA Made Up", "triton_interpreter": False}
    result.sessions = [
        {"started": "then", "ended": "later", "command": "this", "before": QUIET, "after": QUIET}
    ]
    sizes = (result.settings[name] for name in ("shapes", "modes", "world_sizes", "batches"))
    for point in itertools.product(*sizes):
        result.rows += _rows(dict(zip(POINT, point, strict=True)), ours_us)
    return result


def _rows(point: Row, ours_us: float) -> list[Row]:
    batch, several = point["batch"], point["world_size"] > 1
    timed = [("tpsample", TPSAMPLE, "tpsample", ours_us, 8 * several * batch)]
    for way in ["all-gather", "all-to-all"] if several else [STORED]:
        slowest_us = 30.0 if way == "all-gather" else 20.0
        timed.append((f"{way} + race", way, "baseline", slowest_us, 2000 * batch))
        timed.append((f"{way} + slow", way, "baseline", 9 * slowest_us, 2000 * batch))
    rows = with_ratios(
        [
            {
                **row(name, kind, Timing((us, us, us), True), **point),
                "family": family,
                "bytes_sent": sent,
                "fastest": not name.endswith("slow"),
            }
            for name, family, kind, us, sent in timed
        ]
    )
    for each in rows:
        each["tokens_per_s"] = batch / each["median_us"] * 1e6
    return rows
