"""What the noise costs: the same step sampled and greedy."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baselines
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from benchmarks.single_gpu import fastest

QUESTION = "What does the noise cost: sampled rows against greedy rows of the same step?"
VIEWS = [
    View("latency", "Time of a step, µs", x="batch"),
    View("over_limit", "Time ÷ time to read the weight", x="batch", y="over_limit", reference=1),
]


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and candidate."""
    for shape in run.shapes:
        weight = run.weight(shape)
        reads = baselines.weight_reads(weight)
        for batch in run.batches:
            random, greedy = (Problem.make(weight, batch, (t,)) for t in (1.0, 0.0))
            candidates = {
                "sampled, 10 rounds": random.sampled_by(make_sampler(weight, batch)),
                "sampled, 7 rounds": random.sampled_by(
                    make_sampler(weight, batch, philox_rounds=7), rounds=7
                ),
                "greedy": greedy.sampled_by(make_sampler(weight, batch)),
            }
            times = run.time_checked(candidates, reads)
            times["limit"] = fastest(times, reads)
            kinds = {**dict.fromkeys(candidates, "tpsample"), "limit": "limit"}
            yield from with_ratios(
                [
                    row(name, kind, times[name], shape=shape.name, batch=batch)
                    for name, kind in kinds.items()
                ],
                times["limit"].median_us,
            )
