"""A local step on one GPU, beside its limits, the baselines, and variants of itself.

Three questions share one loop: over shapes, numbers of shards and batch sizes. A shard is the
largest of an even split, sampled as a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.lab import baselines, reads
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.problem import Problem, make_sampler
from benchmarks.lab.reads import TILE_READ, fastest
from benchmarks.lab.results import Row, View, row, with_ratios
from tpsample import LMHeadSampler, VocabShard

Steps = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Question:
    """The samplers that are timed, and their company.

    Attributes:
        samplers: options of tpsample's samplers, by name.
        world_sizes: numbers of shards. A run that ends early has measured the first.
        others: baselines of a problem.
        by_tiles: whether times are also held against a read in the shape of the tiles.
        max_rows: the largest batch.
    """

    samplers: dict[str, dict[str, Any]] = field(default_factory=lambda: {"tpsample": {}})
    world_sizes: tuple[int, ...] = (1,)
    others: Callable[[Run, Problem], Steps] = lambda run, problem: {}
    by_tiles: bool = False
    max_rows: int = 512


def rows(run: Run, question: Question) -> Iterator[list[Row]]:
    """Yield one row per number of shards, shape, batch size and candidate; ids are checked first.

    The share of token ids that a screen left is in the rows of steps that have one.
    """
    several = len(question.world_sizes) > 1
    if several:
        run.note("A shard is the largest of an even split, sampled as a vocabulary of its own.")
    for world_size in question.world_sizes:
        for shape in run.shapes:
            weight = run.weight(shape)
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            limits = reads.weight_reads(shard)
            by_tiles = reads.tile_reads(shard) if question.by_tiles else {}
            for batch in (each for each in run.batches if each <= question.max_rows):
                problem = Problem.make(shard, batch)
                samplers = {
                    n: make_sampler(shard, batch, **o) for n, o in question.samplers.items()
                }
                candidates = {
                    name: problem.sampled_by(sampler) for name, sampler in samplers.items()
                }
                others = question.others(run, problem)
                times = run.time_checked(candidates, {**others, **limits, **by_tiles})
                times["limit"] = fastest(times, limits)
                kinds = {
                    **dict.fromkeys(samplers, "tpsample"),
                    **dict.fromkeys(others, "baseline"),
                    **dict.fromkeys(("limit", *by_tiles), "limit"),
                }
                point = {"shape": shape.name, "batch": batch}
                point |= {"world_size": world_size} if several else {}
                found = [row(n, kind, times[n], **point) for n, kind in kinds.items() if n in times]
                for each in found:
                    percent = listed_percent(samplers.get(each["candidate"]))
                    if percent is not None:
                        each["listed_percent"] = percent
                tile_us = times[TILE_READ].median_us if by_tiles else None
                yield with_ratios(found, times["limit"].median_us, tile_us)


def listed_percent(sampler: LMHeadSampler | None) -> float | None:
    """Return the share of its shard that the last step computed exactly; None without a screen."""
    screen = getattr(getattr(sampler, "local", None), "screen", None)
    return screen and 100.0 * int(screen.num_listed_ptr) / screen.num_groups


def _baselines(run: Run, problem: Problem) -> Steps:
    """Return every baseline on one rank; the one with tpsample's noise has passed the gate."""
    run.note(*baselines.notes(run.device, run.dtype))
    logits = problem.hidden_states @ problem.weight.T
    problem.check(baselines.gumbel_argmax(problem)(logits), logits)
    return baselines.single_rank(problem)


def _over(name: str, title: str, x: str = "batch", **options: Any) -> View:
    return View(name, title, x=x, y=name, reference=1, **options)


OURS: dict[str, Any] = {"where": {"kind": "tpsample"}}
LATENCY = View("latency", "Time of a step", x="batch")
LIMIT = _over("over_limit", "Time ÷ time to read the weight")
BY_SHARD: dict[str, Any] = {"x": "world_size", "series": "batch", **OURS}

BENCHMARKS = tuple(
    Benchmark(name, text, views, partial(rows, question=question))
    for name, text, views, question in (
        (
            "single_gpu",
            "One GPU: how close is a step to reading the weight once, and what do baselines take?",
            [
                *(LATENCY, LIMIT),
                _over("over_tile_read", "Time ÷ time to read the weight tile by tile", **OURS),
                _over("over_best_baseline", "tpsample ÷ best baseline (below 1 is faster)", **OURS),
            ],
            Question(others=_baselines, by_tiles=True),
        ),
        (
            "shard",
            "One rank's shard of W on one GPU: how close to reading it once?",
            [
                View("latency", "Time of the local step over the number of shards", **BY_SHARD),
                _over("over_limit", "Time ÷ time to read the shard", **BY_SHARD),
                _over("over_tile_read", "Time ÷ time to read the shard by tiles", **BY_SHARD),
            ],
            Question(world_sizes=(8, 1, 4, 2), by_tiles=True),
        ),
        (
            "screened",
            "Does it pay to read an 8-bit copy of the weights first?",
            [
                _over("over_limit", "Time ÷ time to read the weights once", **OURS),
                View(
                    *("listed", "Share of the token ids that the screen left, %"),
                    x="batch",
                    y="listed_percent",
                ),
            ],
            Question({"plain": {}, "screened": {"screening": "int8"}}, (1, 8), max_rows=64),
        ),
    )
)
