"""Samplers over several ranks: processes of a job, or virtual ranks in this process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.lab.harness import Run
from benchmarks.lab.problem import Candidate, Problem, make_sampler
from benchmarks.lab.virtual_ranks import VirtualWorld
from tpsample import LMHeadSampler, SampleOutput, VocabShard
from tpsample.request.step import Inputs

EXCHANGES = ("collective", "p2p", "two_level", "peer")


def virtual(
    problem: Problem, shards: list[VocabShard], chunks: int = 1
) -> tuple[Candidate, LMHeadSampler]:
    """A step of a virtual rank for each shard, and one of their samplers."""
    weight, world = problem.weight, VirtualWorld(shards, problem.weight.device)
    built = [
        make_sampler(
            weight[shard.start : shard.stop],
            problem.rows,
            group=group,
            exchange="peer",
            chunks=chunks,
        )
        for shard, group in zip(shards, world.ranks, strict=True)
    ]
    token_ids = problem.positions.new_empty(len(shards), problem.rows)
    outputs = [SampleOutput.empty(problem.batch.seed, None) for _ in built]
    for output, ids in zip(outputs, token_ids, strict=True):
        output.token_ids = ids

    def step() -> None:
        # No rank may wait before all have sent.
        started = [
            sampler.pipeline.start(
                Inputs(problem.hidden_states), problem.batch, problem.positions, out=output
            )
            for sampler, output in zip(built, outputs, strict=True)
        ]
        for sampler, begun in zip(built, started, strict=True):
            sampler.pipeline.finish(begun)

    return Candidate(problem, step, token_ids), built[0]


def align(run: Run) -> Callable[[], object]:
    """A small all-reduce on the device: no rank starts its step long before another."""
    token = torch.zeros(1, device=run.device)
    return lambda: dist.all_reduce(token) if run.job.world_size > 1 else None
