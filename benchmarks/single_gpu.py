"""One GPU, whole vocabulary: how close to reading the weight once, and against the baselines?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks import baselines
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from benchmarks.tile_read import TILE_READ, tile_reads
from benchmarks.timing import Timing

QUESTION = "One GPU: how close is a step to reading the weight once, and what do baselines take?"
VIEWS = [
    View("latency", "Time of a step", x="batch"),
    View("over_limit", "Time ÷ time to read the weight", x="batch", y="over_limit", reference=1),
    View(
        "over_tile_read",
        "Time ÷ time to read the weight tile by tile",
        x="batch",
        y="over_tile_read",
        reference=1,
    ),
    View(
        "over_baseline",
        "tpsample ÷ best baseline (below 1 is faster)",
        x="batch",
        y="over_best_baseline",
        where={"kind": "tpsample"},
        reference=1,
    ),
]

_COPY_BYTES = 2 * 2**30
_TINY_COPY_BYTES = 2**20


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and candidate."""
    measure_ceilings(run)
    run.note(*baselines.notes(run.device))
    for shape in run.shapes:
        weight = run.weight(shape)
        reads, by_tiles = baselines.weight_reads(weight), tile_reads(weight)
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            others = baselines.single_rank(problem)
            logits = problem.hidden_states @ weight.T
            gumbel = baselines.logits_samplers(problem)[baselines.GUMBEL]
            run.check(problem, gumbel(logits), logits)
            sampler = make_sampler(weight, batch)
            candidate = {"tpsample": problem.sampled_by(sampler)}
            times = run.time_checked(candidate, {**others, **reads, **by_tiles})
            times["limit"] = fastest(times, reads)
            limits = dict.fromkeys(("limit", *by_tiles), "limit")
            kinds = {"tpsample": "tpsample", **dict.fromkeys(others, "baseline"), **limits}
            yield from with_ratios(
                [
                    row(name, kind, times[name], shape=shape.name, batch=batch)
                    for name, kind in kinds.items()
                    if name in times
                ],
                times["limit"].median_us,
                times[TILE_READ].median_us if by_tiles else None,
            )


def fastest(times: dict[str, Timing], names: Iterable[str]) -> Timing:
    """The fastest of the candidates `names` that were measured."""
    measured = (times[name] for name in names if name in times)
    return min(measured, key=lambda timing: timing.median_us)


def measure_ceilings(run: Run) -> None:
    """Copy bandwidth, and what timing an almost empty step gives; never subtracted."""
    num_bytes = _TINY_COPY_BYTES if run.tiny else _COPY_BYTES
    source = torch.empty(num_bytes, dtype=torch.uint8, device=run.device).random_()
    target = torch.empty_like(source)
    one = torch.zeros(1, device=run.device)
    times = run.time({"copy": lambda: target.copy_(source), "empty": lambda: one.add_(1)})
    run.measured["copy_gb_per_s"] = 2 * num_bytes / times["copy"].median_us / 1e3
    run.measured["smallest_step_us"] = times["empty"].median_us
