"""1/1 … 1/8 of a vocabulary on one GPU: the compute part of a step on W ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import baselines
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from benchmarks.single_gpu import fastest
from benchmarks.tile_read import TILE_READ, tile_reads
from tpsample import VocabShard

QUESTION = "One rank's shard of W, alone on one GPU: how close to reading it once?"
VIEWS = [
    View(
        "latency",
        "Time of the local step over the number of shards",
        x="world_size",
        series="batch",
        where={"candidate": "tpsample"},
    ),
    View(
        "over_limit",
        "Time ÷ time to read the shard",
        x="world_size",
        y="over_limit",
        series="batch",
        where={"candidate": "tpsample"},
        reference=1,
    ),
    View(
        "over_tile_read",
        "Time ÷ time to read the shard tile by tile",
        x="world_size",
        y="over_tile_read",
        series="batch",
        where={"candidate": "tpsample"},
        reference=1,
    ),
]

WORLD_SIZES = (8, 1, 4, 2)
"""The 8-way shard comes first, because a run that ends early should have measured it."""


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, number of shards, batch size and candidate."""
    run.note("A shard is the largest of an even split, sampled as a vocabulary of its own.")
    for world_size in WORLD_SIZES:
        for shape in run.shapes:
            weight = run.weight(shape)
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            reads, by_tiles = baselines.weight_reads(shard), tile_reads(shard)
            for batch in run.batches:
                problem = Problem.make(shard, batch)
                candidate = {"tpsample": problem.sampled_by(make_sampler(shard, batch))}
                times = run.time_checked(candidate, {**reads, **by_tiles})
                times["limit"] = fastest(times, reads)
                kinds = {"tpsample": "tpsample", **dict.fromkeys(("limit", *by_tiles), "limit")}
                point = {"shape": shape.name, "world_size": world_size, "batch": batch}
                yield from with_ratios(
                    [row(name, kind, times[name], **point) for name, kind in kinds.items()],
                    times["limit"].median_us,
                    times[TILE_READ].median_us if by_tiles else None,
                )
