"""The arguments that the kernels of the package are launched with, recorded from steps.

Steps of every kind are taken on a CPU, by one rank and by eight virtual ones. Nothing is launched:
each launch goes on a list (`benchmarks.lab.launches`), so no second list of arguments is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.lab.launches import Launch, Pointer, listed
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from tpsample import SamplingBatch, VocabShard, verify
from tpsample.agreement import construction
from tpsample.ranks.virtual import VirtualWorld
from tpsample.request.kinds import KINDS, Kind, batches_of

SHAPES = ((128256, 64), (2048, 4096))
"""A large vocabulary and a large hidden size: some blocks grow with one, some with the other."""
ROWS, NUM_DRAFTS, WORLD_SIZE, CHUNKS = 32, 2, 8, 2
CONTROLS: tuple[Kind, ...] = ("allowed ids", "bad words", "min_tokens", "penalties", "bias")

Arguments = dict[str, Any]


@cache
def recorded() -> dict[str, Arguments]:
    """Return names and values of the arguments of every kernel, by "module:name".

    Of several launches of a kernel, the one with most tensors counts, then the one with the largest
    constants. Where an argument is None there, the value is another launch's.
    """
    with _no_kernels() as launches:
        large, wide = (
            Problem.make(make_weight(*shape, torch.device("cpu")), ROWS) for shape in SHAPES
        )
        _one_rank(large)
        _one_rank(wide, screening="int8")
        _several_ranks(wide)
    found: dict[str, Arguments] = {}
    for launch in sorted(launches, key=_fullness, reverse=True):
        known = found.setdefault(launch.kernel, dict(launch.arguments))
        known |= {name: value for name, value in launch.arguments if known.get(name) is None}
    return found


def _one_rank(problem: Problem, **options: Any) -> None:
    """Take steps of one sample and of two, and verify drafts."""
    weight, hidden_size = problem.weight, problem.weight.shape[1]
    head = {"bias": weight[:, 0].clone(), "logit_scale": 0.5, "logit_softcap": 30.0}
    sampler = make_sampler(weight, ROWS, **head, **options)
    for batch in (batches := list(_batches(problem))):
        sampler(weight.new_zeros(batch.rows, hidden_size), batch, 0)
    for batch in (batches[0], batches[-1]):
        sampler(weight.new_zeros(batch.rows, hidden_size), batch, 0, num_samples=2)
    *_, batch = batches_of(CONTROLS, [ROWS // 2], problem.vocab_size, weight.device)
    drafts = torch.zeros(batch.rows, NUM_DRAFTS, dtype=torch.int64)
    verify(sampler, weight.new_zeros(*drafts.shape, hidden_size), drafts[:, 1:], batch, 0)


def _several_ranks(problem: Problem) -> None:
    vocab_size, hidden_size = problem.weight.shape
    shards = [VocabShard.even(vocab_size, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    world = VirtualWorld(shards)
    options: dict[str, Any] = {"exchange": "peer", "chunks": CHUNKS}
    samplers = [
        make_sampler(problem.weight[shard.start : shard.stop], ROWS, group=ranks, **options)
        for shard, ranks in zip(shards, world.ranks, strict=True)
    ]
    for batch in _batches(problem):
        world.step(samplers, problem.weight.new_zeros(batch.rows, hidden_size), batch, 0)


def _batches(problem: Problem) -> Iterator[SamplingBatch]:
    """Yield batches with masks of the caller, of each kind of requests, and of all kinds."""
    vocab_size = problem.vocab_size
    masked = SamplingBatch.from_params(problem.params, vocab_size=vocab_size)
    masked.grammar_bitmask = torch.full((ROWS, -(-vocab_size // 32)), -1, dtype=torch.int32)
    masked.forced_token_ids = torch.full((ROWS,), -1, dtype=torch.int64)
    yield masked
    yield from batches_of(list(KINDS), [ROWS], vocab_size, problem.weight.device)


def _fullness(launch: Launch) -> tuple[int, list[int]]:
    pointers = sum(isinstance(value, Pointer) for _, value in launch.arguments)
    return pointers, [value for _, value in launch.arguments if isinstance(value, int)]


@contextmanager
def _no_kernels() -> Iterator[dict[Launch, int]]:
    """List launches on a CPU, with memory filled that no kernel has written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with listed() as launches, patch.object(construction, "interpreted", lambda: True):
            yield launches
    finally:
        torch.use_deterministic_algorithms(before)
