"""Plain steps with `screening="int8"` and without, on whole heads and on 8-way shards."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baselines
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from benchmarks.single_gpu import fastest
from tpsample import LMHeadSampler, VocabShard

QUESTION = "Does it pay to read an 8-bit copy of the weights first?"
VIEWS = [
    View(
        "over_limit",
        "Time ÷ time to read the weights once",
        x="batch",
        y="over_limit",
        where={"kind": "tpsample"},
        reference=1,
    ),
    View(
        "listed",
        "Share of the token ids that the screen left, %",
        x="batch",
        y="listed_percent",
        where={"candidate": "screened"},
    ),
]
WORLD_SIZES = (1, 8)
MAX_ROWS = 64
"""Of a screened step."""


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, number of shards, batch size and candidate; ids are checked first."""
    run.note("A shard is the largest of an even split, sampled as a vocabulary of its own.")
    for world_size in WORLD_SIZES:
        for shape in run.shapes:
            weight = run.weight(shape)
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            reads = baselines.weight_reads(shard)
            for batch in (b for b in run.batches if b <= MAX_ROWS):
                problem = Problem.make(shard, batch)
                samplers = {
                    "plain": make_sampler(shard, batch),
                    "screened": make_sampler(shard, batch, screening="int8"),
                }
                candidates = {name: problem.sampled_by(each) for name, each in samplers.items()}
                times = run.time_checked(candidates, reads)
                times["limit"] = fastest(times, reads)
                kinds = {**dict.fromkeys(samplers, "tpsample"), "limit": "limit"}
                point = {"shape": shape.name, "world_size": world_size, "batch": batch}
                found = [row(name, kind, times[name], **point) for name, kind in kinds.items()]
                if (percent := listed_percent(samplers["screened"])) is not None:
                    found[1]["listed_percent"] = percent
                yield from with_ratios(found, times["limit"].median_us)


def listed_percent(sampler: LMHeadSampler) -> float | None:
    """Return which share of its shard the last step computed exactly; None if nobody counts it."""
    screen = getattr(sampler.local, "screen", None)
    return screen and 100.0 * int(screen.num_listed_ptr) / screen.num_groups
