"""A whole step on W ranks, the slowest rank counts: exchanges of words against gathered logits.

torchrun --standalone --nproc-per-node 8 -m benchmarks.run end_to_end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch.distributed as dist
from torch import Tensor

from benchmarks import baselines, ranks
from benchmarks.harness import Row, Run
from benchmarks.problem import Problem, make_sampler
from benchmarks.results import View, row, with_ratios
from tpsample import VocabShard
from tpsample.ranks.ranks import Ranks

QUESTION = "A step on W ranks: time, tokens per second, efficiency, against gathering the logits?"
VIEWS = [
    View("latency", "Time of a step on the slowest rank, µs", x="batch"),
    View("tokens", "Tokens per second", x="batch", y="tokens_per_s"),
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
    for shape in run.shapes:
        weight = run.weight(shape)
        shard = VocabShard.even(shape.vocab_size, run.job.rank, world_size)
        for batch in run.batches:
            problem = Problem.make(weight, batch)
            built = ranks.samplers(run, weight, shard, batch, CHUNKS) if world_size > 1 else {}
            candidates = {name: problem.sampled_by(sampler) for name, sampler in built.items()}
            alone = make_sampler(weight, batch, group=Ranks())
            candidates["one rank"] = problem.sampled_by(alone)
            others = gathered(problem, shard, world_size)
            times = run.time_checked(
                candidates, others, ranks.align(run) if world_size > 1 else None
            )
            point = {"shape": shape.name, "world_size": world_size, "batch": batch}
            kinds = {**dict.fromkeys(candidates, "tpsample"), **dict.fromkeys(others, "baseline")}
            if world_size > 1:
                kinds["one rank"] = "one rank"
            one_rank_us = times["one rank"].median_us
            measured = [row(n, kinds[n], times[n], **point) for n in kinds if n in times]
            for each in with_ratios(measured):
                each["tokens_per_s"] = batch / each["median_us"] * 1e6
                ranks_used = 1 if each["candidate"] == "one rank" else world_size
                each["efficiency"] = one_rank_us / (ranks_used * each["median_us"])
                yield each
            for sampler in built.values():
                sampler.close()


def gathered(
    problem: Problem, shard: VocabShard, world_size: int
) -> dict[str, Callable[[], Tensor]]:
    """Every baseline behind an all-gather of the local logits in bf16; without one on one rank."""
    if world_size == 1:
        return baselines.single_rank(problem)
    hidden, vocab_size = problem.hidden_states, problem.vocab_size
    width = len(VocabShard.even(vocab_size, 0, world_size))
    part = hidden.new_zeros(width, hidden.shape[1])  # padded: every rank gathers as many columns
    part[: len(shard)] = problem.weight[shard.start : shard.stop]
    parts = hidden.new_empty(world_size, problem.rows, width)
    # torch 2.13 renamed it
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def logits() -> Tensor:
        all_gather(parts.view(-1, width), hidden @ part.T)
        return parts.transpose(0, 1).reshape(problem.rows, -1)[:, :vocab_size]

    steps: dict[str, Callable[[], Tensor]] = {}
    for name, sample in baselines.logits_samplers(problem).items():
        if name == baselines.RACE:
            sample = baselines.compiled(sample, hidden.device)
        steps[f"all-gather + {name}"] = partial(_sample_gathered, sample, logits)
    return steps


def _sample_gathered(sample: Callable[[Tensor], Tensor], logits: Callable[[], Tensor]) -> Tensor:
    return sample(logits())
