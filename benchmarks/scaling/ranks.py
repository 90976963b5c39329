"""What the ranks of one world size run: point after point, each written as soon as it is done.

    python -m benchmarks.scaling.ranks RECORD SECONDS      one rank; several under torchrun

Rank 0 writes the record and prints a line of JSON per point. A candidate with a wrong id, or one
that raises, is left out of the point on every rank, and the record says why.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import baselines, ranks
from benchmarks.harness import Run
from benchmarks.problem import NearTies, Problem
from benchmarks.results import row, with_ratios
from benchmarks.scaling import candidates
from benchmarks.scaling.candidates import Entry
from benchmarks.scaling.record import Point, Record
from benchmarks.shapes import shape_named
from benchmarks.timing import one_line
from tpsample.distributed import Job, join

TIMEOUT_S = 300.0
"""How long a rank waits for another: loading libraries and compiling may take minutes."""


def measure_missing(
    job: Job,
    path: Path,
    seconds: float = float("inf"),
    on_point: Callable[[dict[str, Any]], None] = lambda point: None,
) -> None:
    """Measure what the record in `path` lacks for this number of ranks. Collective.

    Args:
        seconds: no point is begun after this long, by the clock of rank 0.
        on_point: called on rank 0 after a point was written.
    """
    record = Record.load(path)
    deadline = time.monotonic() + seconds
    shape, weight = "", torch.empty(0)
    for point in record.missing(job.world_size):
        if job.gather(time.monotonic() > deadline)[0]:
            return
        if point.shape != shape:
            shape, weight = point.shape, Run(job).weight(shape_named(point.shape))
        run = Run(job, repeats=record.settings.repeats)
        measured = measure(run, weight, point)
        if job.rank == 0:
            record.points.append(measured)
            record.note(*baselines.notes(job.device), *run.notes)
            record.save(path)
            on_point(measured)


def measure(run: Run, weight: Tensor, point: Point) -> dict[str, Any]:
    """Return a point of the record: rows of what is right, and what was left out. Collective."""
    job = run.job
    started = time.monotonic()
    problem = Problem.make(weight, point.batch)
    built = candidates.build(problem, point.mode, job.rank, job.world_size)
    left_out: dict[str, str] = {}
    near_ties, right = NearTies(), []
    for entry in built:
        found, why = _checked(entry)
        if why := next((each for each in job.gather(why) if each is not None), None):
            left_out[entry.name] = why
        else:
            near_ties += found
            right.append(entry)
    gated = {e.name: e.ids.clone() for e in right if e.ids is not None}
    sent = {e.name: max(job.gather(e.bytes_sent())) for e in right}
    times = run.time(
        {e.name: e.step for e in right}, ranks.align(run) if job.world_size > 1 else None
    )
    for entry in right:
        if entry.ids is None:
            continue
        if not all(job.gather(torch.equal(entry.ids, gated[entry.name]))):
            left_out[entry.name] = "the timed steps gave other tokens than the checked one"
    for entry in right:
        if entry.name not in times:
            left_out.setdefault(entry.name, "its step raises; see the notes")
    rows = with_ratios(
        [
            {**row(e.name, e.kind, times[e.name]), "family": e.family, "bytes_sent": sent[e.name]}
            for e in right
            if e.name not in left_out
        ]
    )
    for each in rows:
        each["tokens_per_s"] = point.batch / each["median_us"] * 1e6
    for entry in built:
        entry.close()
    return {
        **asdict(point),
        "rows": rows,
        "left_out": [{"candidate": name, "why": why} for name, why in left_out.items()],
        "checks": {
            "rows_compared": point.batch * len(gated),
            "near_ties": near_ties.rows,
            "largest_gap": near_ties.largest_gap,
        },
        "seconds": time.monotonic() - started,
    }


def _checked(entry: Entry) -> tuple[NearTies, str | None]:
    """Check a candidate; return what it allowed, and what is wrong with it."""
    try:
        return entry.check(), None
    except Exception as error:
        return NearTies(), one_line(error)


def main(path: str, seconds: str) -> None:
    """Join the job that this process was started in, and measure."""
    with join(timeout_s=TIMEOUT_S) as job:
        if job.device.type == "cpu":
            torch.set_num_threads(Record.load(Path(path)).settings.threads)

        def told(point: dict[str, Any]) -> None:
            fields = {name: point[name] for name in ("world_size", "shape", "batch", "mode")}
            line = {**fields, "left_out": point["left_out"], "seconds": point["seconds"]}
            print(json.dumps(line), flush=True)

        measure_missing(job, Path(path), float(seconds), told)


if __name__ == "__main__":
    main(*sys.argv[1:])
