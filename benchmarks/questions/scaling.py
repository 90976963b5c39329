"""Throughput over the number of ranks: points of all world sizes in one result.

`python -m benchmarks.scaling` starts the ranks. A point is one world size, shape, batch size and
kind of request; its candidates are timed in turn in the same processes. A candidate with a wrong
id, or one that raises, is left out of the point on every rank, and the result says why.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from benchmarks.lab import baselines, ranks
from benchmarks.lab.harness import Benchmark, OutOfTime, Run
from benchmarks.lab.problem import Problem
from benchmarks.lab.results import POINT, Result, Row, View, row, with_ratios
from benchmarks.questions.scaling_candidates import FAMILIES, build


def benchmark(run: Run) -> Benchmark:
    """Return the question, with views of the sizes of this run.

    Its options are `world_sizes`, `modes`, names in `scaling_candidates.MODES`, `exchanges`, each a
    candidate of every point, and `threads`: of every rank on a CPU, the same for each world size.
    """
    return Benchmark(
        "scaling",
        "Tokens per second over the number of ranks: tpsample, and both ways of moving logits, "
        "each with its fastest sampler?",
        list(_views(run)),
        rows,
    )


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the candidates of each point that is not done yet. Collective."""
    _note(run)
    for shape in run.shapes:
        weight = run.weight(shape)
        for batch, mode in itertools.product(run.batches, run.options["modes"]):
            found = (shape.name, mode, run.job.world_size, batch)
            if found in run.done:
                continue
            try:
                yield _of_point(run, weight, dict(zip(POINT, found, strict=True)))
            except OutOfTime:
                return


def _of_point(run: Run, weight: Tensor, point: Row) -> list[Row]:
    """Return the candidates of a point, those that are left out last."""
    problem = Problem.make(weight, point["batch"])
    entries = build(run, problem, point["mode"])
    wrong: dict[str, str] = {}
    candidates = {entry.name: entry for entry in entries}
    times = run.time_checked(candidates, {}, ranks.align(run), left_out=wrong)
    found = [
        {
            **row(entry.name, entry.kind, times[entry.name], **point),
            "family": entry.family,
            "bytes_sent": max(run.job.gather(entry.bytes_sent())),
        }
        for entry in entries
        if entry.name in times
    ]
    for each in with_ratios(found):
        family = [other["median_us"] for other in found if other["family"] == each["family"]]
        each["fastest"] = each["median_us"] == min(family)
        each["tokens_per_s"] = problem.rows / each["median_us"] * 1e6
    for entry in entries:
        entry.close()
    run.note(*_who(found))
    return found + [{**point, "candidate": name, "why": why} for name, why in wrong.items()]


def _who(found: list[Row]) -> list[str]:
    """Say who each candidate is."""
    families = dict.fromkeys(row["family"] for row in found)
    samplers = dict.fromkeys(row["candidate"].split(" + ", 1)[-1] for row in found)
    return [
        *(f"{name}: {FAMILIES[name]}." for name in families),
        *(f"{name}: {baselines.WHO[name]}." for name in samplers if name in baselines.WHO),
    ]


def _note(run: Run) -> None:
    run.note(
        "tpsample's ids are compared with the oracle before a time counts, and again with the "
        "timed steps. Logits of a baseline are compared with the product of the whole weight, and "
        "its ids with those that the request allows.",
        "Requests: temperature 1 in all rows, with the filter that a heading names. In pictures "
        "and tables of tokens each exchange has its fastest sampler.",
    )
    if run.device.type == "cpu":
        run.note(
            f"Threads per rank, for every W: {run.options['threads']}. On a CPU tpsample's result "
            "is that of the exact product, rounded once to fp32."
        )
    else:
        run.note("Steps are replays of a CUDA graph with a cold L2, unless marked.")
    run.note(*baselines.notes(run.device, run.dtype))


def _views(run: Run) -> Iterator[View]:
    world_sizes, modes = run.options["world_sizes"], run.options["modes"]
    for shape in (shape.name for shape in run.shapes):
        for mode in modes:
            here, name = {"shape": shape, "mode": mode}, f"{shape}-{mode.replace(' ', '-')}"
            x: dict[str, Any] = {"x": "world_size", "panel": "batch"}
            yield View(
                *(f"tokens-{name}" * (len(world_sizes) > 1), f"Tokens per second, {shape}, {mode}"),
                **x,
                y="tokens_per_s",
                series="family",
                where={**here, "fastest": True},
                ideal=True,
            )
            yield View("", f"Time of a step, {shape}, {mode}", **x, where=here)
        largest = {"shape": shape, "world_size": max(world_sizes), "fastest": True}
        yield View(
            *(f"bytes-{shape}", f"Bytes that a rank sends, {shape}, W = {largest['world_size']}"),
            x="batch",
            y="bytes_sent",
            series="family",
            panel="mode",
            where=largest,
        )
        yield View(
            *(f"ratio-{shape}", f"tpsample ÷ best baseline (below 1 is faster), {shape}"),
            x="batch",
            y="over_best_baseline",
            series="world_size",
            panel="mode",
            where={"shape": shape},
            reference=1,
        )


def missing(result: Result) -> dict[int, int]:
    """Return how many points are yet to be measured, by world size; none where all are done."""
    asked, done = result.settings, set(result.points())
    sizes = (asked[name] for name in ("shapes", "modes", "world_sizes", "batches"))
    left = Counter(point[2] for point in itertools.product(*sizes) if point not in done)
    return {w: left[w] for w in asked["world_sizes"] if left[w]}


def warnings(result: Result, failed: list[str]) -> list[str]:
    """Return the warnings of the page: too many ranks, missing points, and sessions that failed."""
    settings, lines = result.settings, list(failed)
    ranks, threads = max(settings["world_sizes"]), settings["threads"]
    cores = result.machine["cpu_cores"]
    if result.machine["hardware"] == "CPU" and ranks * threads > cores:
        lines.append(
            f"Up to {ranks} ranks of {threads} threads shared {cores} cores: more ranks than cores "
            "cannot be faster."
        )
    if left := missing(result):
        each = ", ".join(f"{number} of W = {w}" for w, number in left.items())
        lines.append(f"Not complete: points are missing ({each}); the same command goes on.")
    return lines
