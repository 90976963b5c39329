"""A process that was forked by a rank leaves that rank's connections alone, and says so."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.limits import slowness
from tests.support.mistakes import HIDDEN, WEIGHT, B, batch_of, half, tokens
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler, VocabShard, sample_draft
from tpsample.distributed import Job
from tpsample.training import KeptTokens, kept_logprobs

FORKED = (
    "RuntimeError",
    "group: its connections are those of the process that forked this one, and what this one sends "
    "would be taken for that one's; sample there, or start this process by spawn, with a process "
    "group of its own",
)


def _in_a_child(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[str, str]]:
    """Return how each call ends in a forked process, which ends without an exit handler."""
    reads, writes = os.pipe()
    if not os.fork():
        signal.alarm(round(20 * slowness()))  # ends a child that waits in what it sent
        try:
            os.write(writes, pickle.dumps({name: outcome(call) for name, call in calls.items()}))
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as told:
        found: dict[str, tuple[str, str]] = pickle.load(told)
    os.wait()
    return found


def _fork() -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Return how the calls of a child end that are refused, and those that send nothing."""
    rank = dist.get_rank()
    sampler = LMHeadSampler(half(rank), backend="torch", max_rows=4)
    expected = tokens(sampler)
    zeros = torch.zeros(B, len(sampler.shard))

    def alone() -> None:
        assert tokens(LMHeadSampler(WEIGHT, backend="torch", group="alone")) == expected

    refused = _in_a_child(
        {
            "step": lambda: tokens(sampler),
            "sample_logits": lambda: sampler.sample_logits(zeros, batch_of(), 0),
            "sample_draft": lambda: sample_draft(sampler, zeros, batch_of(), 0, 0),
            "unknown": lambda: sampler(HIDDEN, batch_of(), 0, top_p=0.9),  # type: ignore[call-arg]
            **{
                name: getattr(sampler, name)
                for name in ("check", "compare", "refresh", "reset", "warm_up")
            },
            "unknown in a reset": lambda: sampler.reset(top_p=0.9),  # type: ignore[call-arg]
            "unknown in a build": lambda: LMHeadSampler(top_p=0.9),  # type: ignore[call-arg]
            "build": lambda: LMHeadSampler(half(rank), backend="torch"),
            "gather": lambda: Job().gather(0),
        }
    )
    right = _in_a_child({"alone": alone, "counters": sampler.counters, "close": sampler.close})
    assert tokens(sampler) == expected
    sampler.compare()
    return refused, right


def test_a_forked_process_is_refused_and_its_parents_go_on():
    refused, right = same_on_ranks(2, _fork, group_timeout_s=10)
    assert refused == dict.fromkeys(refused, FORKED)
    assert right == dict.fromkeys(right, ("nothing raised", ""))


def _fork_before_a_sampler() -> dict[str, tuple[str, str]]:
    """Return how calls of a child end whose parent has groups and has built no sampler yet."""
    rank = dist.get_rank()
    other = dist.new_group([0, 1])
    shard = VocabShard.even(len(WEIGHT), rank, 2)

    def score(group: dist.ProcessGroup | None = None) -> list[float]:
        kept, drawn = KeptTokens.from_lists([None] * B), torch.zeros(B, dtype=torch.int64)
        given = HIDDEN, WEIGHT[shard.start : shard.stop], drawn, kept, 1.0
        return kept_logprobs(*given, group=group, shard=shard).logprobs.tolist()

    refused = _in_a_child(
        {
            "build": lambda: LMHeadSampler(half(rank), backend="torch"),
            "build over another": lambda: LMHeadSampler(half(rank), backend="torch", group=other),
            "gather": lambda: Job().gather(0),
            "score": score,
            "unknown in a score": lambda: kept_logprobs(top_p=0.9),  # type: ignore[call-arg]
            "score over another": lambda: score(other),
        }
    )
    alone = tokens(LMHeadSampler(WEIGHT, backend="torch", group="alone"))
    assert tokens(LMHeadSampler(half(rank), backend="torch", group=other)) == alone
    assert score() == score(other)
    return refused


def test_the_groups_that_a_process_had_when_it_forked_are_not_those_of_its_child():
    refused = same_on_ranks(2, _fork_before_a_sampler, group_timeout_s=10)
    assert refused == dict.fromkeys(refused, FORKED)
