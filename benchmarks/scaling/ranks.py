"""The program of the ranks of one world size: point after point, each written when it is done.

    python -m benchmarks.scaling.ranks RESULT SECONDS      one rank; several under torchrun

Rank 0 writes the result and prints a line of JSON per point. A candidate with a wrong id, or one
that raises, is left out of the point on every rank, and the result says why.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab import baselines, ranks
from benchmarks.lab.harness import Run
from benchmarks.lab.problem import NearTies, Problem
from benchmarks.lab.results import Result, Row, row, with_ratios
from benchmarks.lab.shapes import shape_named
from benchmarks.lab.timing import one_line
from benchmarks.scaling import candidates
from benchmarks.scaling.candidates import FAMILIES, Entry
from benchmarks.scaling.plan import Point, Settings, missing
from tpsample.distributed import Job, join

TIMEOUT_S = 300.0
"""How long a rank waits for another: loading libraries and compiling may take minutes."""

Told = Callable[[Point, list[Row]], None]
"""Called with a point that was written, and the candidates that it leaves out."""


def measure_missing(
    job: Job, path: Path | None, seconds: float = float("inf"), on_point: Told = lambda *_: None
) -> None:
    """Measure the points that the result in `path` lacks for this number of ranks. Collective.

    Args:
        path: read and written by rank 0; the others may be on other hosts.
        seconds: no point is begun after this long, by the clock of rank 0.
        on_point: called on rank 0 after a point was written.
    """
    result = Result.load(path) if path is not None and job.rank == 0 else None
    points = [] if result is None else [asdict(p) for p in missing(result, job.world_size)]
    told, todo = job.gather([result and result.settings, points])[0]
    settings = Settings(**told)
    if job.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    deadline = time.monotonic() + seconds
    shape, weight = "", torch.empty(0)
    for point in (Point(**each) for each in todo):
        if job.gather(time.monotonic() > deadline)[0]:
            return
        if point.shape != shape:
            shape, weight = point.shape, Run(job).weight(shape_named(point.shape))
        run = Run(job, repeats=settings.repeats)
        rows, left_out = measure(run, weight, point, settings.exchanges)
        if result is not None and path is not None:
            result.rows += rows
            result.left_out += left_out
            result.add_checks(run.near_ties.checks(run.checked_rows))
            result.note(*baselines.notes(job.device), *run.notes, *_who(rows))
            result.save(path)
            on_point(point, left_out)


def measure(
    run: Run, weight: Tensor, point: Point, exchanges: Sequence[str]
) -> tuple[list[Row], list[Row]]:
    """Return the rows of right candidates, and the candidates that are left out. Collective."""
    job = run.job
    problem = Problem.make(weight, point.batch)
    built = candidates.build(problem, point.mode, job.rank, job.world_size, exchanges)
    wrong: dict[str, str] = {}
    right = []
    for entry in built:
        found, why = _checked(entry)
        if why := next((each for each in job.gather(why) if each is not None), None):
            wrong[entry.name] = why
        else:
            run.near_ties += found
            right.append(entry)
    gated = {e.name: e.ids.clone() for e in right if e.ids is not None}
    run.checked_rows += point.batch * len(gated)
    sent = {e.name: max(job.gather(e.bytes_sent())) for e in right}
    times = run.time(
        {e.name: e.step for e in right}, ranks.align(run) if job.world_size > 1 else None
    )
    for entry in right:
        same = entry.ids is None or torch.equal(entry.ids, gated[entry.name])
        if not all(job.gather(same)):
            wrong[entry.name] = "the timed steps gave other tokens than the checked one"
        elif entry.name not in times:
            wrong[entry.name] = "its step raises; see the notes"
    own = asdict(point)
    rows = [
        {
            **row(e.name, e.kind, times[e.name], **own),
            "family": e.family,
            "bytes_sent": sent[e.name],
        }
        for e in right
        if e.name not in wrong
    ]
    for each in with_ratios(rows):
        family = [other["median_us"] for other in rows if other["family"] == each["family"]]
        each["fastest"] = each["median_us"] == min(family)
        each["tokens_per_s"] = point.batch / each["median_us"] * 1e6
    for entry in built:
        entry.close()
    return rows, [{**own, "candidate": name, "why": why} for name, why in wrong.items()]


def _checked(entry: Entry) -> tuple[NearTies, str | None]:
    """Check a candidate; return the near ties that it has, and what is wrong with it."""
    try:
        return entry.check(), None
    except Exception as error:
        return NearTies(), one_line(error)


def _who(rows: list[Row]) -> list[str]:
    """Say who each candidate is."""
    families = dict.fromkeys(row["family"] for row in rows)
    samplers = dict.fromkeys(row["candidate"].split(" + ", 1)[-1] for row in rows)
    return [
        *(f"{name}: {FAMILIES[name]}." for name in families),
        *(f"{name}: {baselines.WHO[name]}." for name in samplers if name in baselines.WHO),
    ]


def main(path: str, seconds: str) -> None:
    """Join the job that this process was started in, and measure."""
    with join(timeout_s=TIMEOUT_S) as job:

        def told(point: Point, left_out: list[Row]) -> None:
            line: dict[str, Any] = {**asdict(point), "left_out": left_out}
            print(json.dumps(line), flush=True)

        measure_missing(job, Path(path), float(seconds), told)


if __name__ == "__main__":
    main(*sys.argv[1:])
