"""What the noise costs: a sampled step against the same product with a plain greedy epilogue.

A greedy row of the sampler would not tell: it makes the same noise and multiplies it by 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baselines
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from benchmarks.single_gpu import fastest

QUESTION = (
    "What does the noise cost: a sampled step against a plain greedy kernel of the same tile?"
)
VIEWS = [
    View("latency", "Time of a step", x="batch"),
    View("over_limit", "Time ÷ time to read the weight", x="batch", y="over_limit", reference=1),
    View(
        "over_greedy",
        "Sampled ÷ greedy without noise",
        x="batch",
        y="over_best_baseline",
        where={"kind": "tpsample"},
        reference=1,
    ),
]

GREEDY = "greedy, no noise"


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and candidate."""
    if not baselines.has_triton(run.device):
        run.note("Without Triton there is no greedy kernel to compare with.")
    for shape in run.shapes:
        weight = run.weight(shape)
        reads = baselines.weight_reads(weight)
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            candidates = {
                "sampled, 10 rounds": problem.sampled_by(make_sampler(weight, batch)),
                "sampled, 7 rounds": problem.sampled_by(
                    make_sampler(weight, batch, philox_rounds=7), rounds=7
                ),
            }
            others = {}
            if baselines.has_triton(run.device):
                others[GREEDY] = baselines.greedy(problem)
            times = run.time_checked(candidates, {**others, **reads})
            times["limit"] = fastest(times, reads)
            kinds = {
                **dict.fromkeys(candidates, "tpsample"),
                **dict.fromkeys(others, "baseline"),
                "limit": "limit",
            }
            yield from with_ratios(
                [
                    row(name, kind, times[name], shape=shape.name, batch=batch)
                    for name, kind in kinds.items()
                    if name in times
                ],
                times["limit"].median_us,
            )
