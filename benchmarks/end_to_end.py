"""A whole step on W ranks, the slowest rank counts: exchanges of words against whole logits.

torchrun --standalone --nproc-per-node 8 -m benchmarks.run end_to_end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from benchmarks import baselines, ranks, whole_logits
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from tpsample import VocabShard
from tpsample.ranks.ranks import Ranks

QUESTION = "A step on W ranks: time, tokens per second, efficiency, against whole logits?"
VIEWS = [
    View("latency", "Time of a step on the slowest rank", x="batch"),
    View("tokens", "Tokens per second", x="batch", y="tokens_per_s"),
    View("bytes", "Bytes that a rank sends", x="batch", y="bytes_out"),
    View(
        "efficiency",
        "Scaling efficiency: time of one rank ÷ (W · time)",
        x="batch",
        y="efficiency",
        where={"kind": "tpsample"},
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

CHUNKS = (1, 4)


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and candidate."""
    world_size = run.job.world_size
    run.note(*baselines.notes(run.device), "One rank: the whole vocabulary on every rank alone.")
    if world_size > 1:
        run.note(*whole_logits.notes())
    for shape in run.shapes:
        weight = run.weight(shape)
        shard = VocabShard.even(shape.vocab_size, run.job.rank, world_size)
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            built = ranks.samplers(run, weight, shard, batch, CHUNKS) if world_size > 1 else {}
            candidates = {name: problem.sampled_by(sampler) for name, sampler in built.items()}
            alone = make_sampler(weight, batch, group=Ranks())
            name_alone = "one rank" if world_size > 1 else "tpsample"
            candidates[name_alone] = problem.sampled_by(alone)
            others, sent = _baselines(problem, run)
            sent |= {name: sampler.exchange.bytes_sent(batch) for name, sampler in built.items()}
            times = run.time_checked(
                candidates, others, ranks.align(run) if world_size > 1 else None
            )
            point = {"shape": shape.name, "world_size": world_size, "batch": batch}
            kinds = {**dict.fromkeys(candidates, "tpsample"), **dict.fromkeys(others, "baseline")}
            if world_size > 1:
                kinds["one rank"] = "one rank"
            one_rank_us = times[name_alone].median_us
            measured = [row(n, kinds[n], times[n], **point) for n in kinds if n in times]
            for each in with_ratios(measured):
                each["bytes_out"] = sent.get(each["candidate"], 0)
                each["tokens_per_s"] = batch / each["median_us"] * 1e6
                if world_size > 1:
                    ranks_used = 1 if each["candidate"] == "one rank" else world_size
                    each["efficiency"] = one_rank_us / (ranks_used * each["median_us"])
                yield each
            for sampler in built.values():
                sampler.close()


def _baselines(
    problem: Problem, run: Run
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """Every baseline, and the most bytes that a rank sends with it."""
    if run.job.world_size == 1:
        return baselines.single_rank(problem), {}
    ways = [kind(problem, run.job.rank, run.job.world_size) for kind in whole_logits.KINDS]
    whole_logits.require_equal_tokens(ways)
    steps: dict[str, Callable[[], Tensor]] = {}
    sent: dict[str, int] = {}
    for way in ways:
        own = way.steps()
        steps |= own
        sent |= dict.fromkeys(own, max(run.job.gather(way.bytes_sent)))
    return steps, sent
