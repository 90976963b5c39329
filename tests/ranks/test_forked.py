"""A process that was forked by a rank leaves that rank's connections alone, and says so."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.mistakes import HIDDEN, WEIGHT, B, batch_of, half, tokens
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler, sample_draft
from tpsample.distributed import Job

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
            "unknown": lambda: sampler(HIDDEN, batch_of(), 0, top_p=0.9),  # type: ignore[arg-type]
            **{
                name: getattr(sampler, name)
                for name in ("check", "compare", "refresh", "reset", "warm_up")
            },
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
