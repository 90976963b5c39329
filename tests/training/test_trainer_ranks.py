"""A rank that leaves a call of a trainer is named, and nothing follows what it left half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tpsample import VocabShard
from tpsample.training import KeptLogprobs, KeptTokens, kept_logprobs

V, D = 20, 4


def _scores(states: torch.Tensor | None = None, **given: Any) -> KeptLogprobs:
    generator = torch.Generator().manual_seed(0)
    drawn, weight = torch.randn(3, D, generator=generator), torch.randn(V, D, generator=generator)
    shard = VocabShard.even(V, dist.get_rank(), 2)
    rows = weight[shard.start : shard.stop].clone()
    kept = KeptTokens.from_lists([[3, 5], None, [19, 0, 7]])
    arguments = drawn if states is None else states, rows, torch.tensor([5, 2, 0]), kept, 0.7
    return kept_logprobs(*arguments, **{"shard": shard} | given)


def _leaf() -> torch.Tensor:
    return torch.ones(3, D, requires_grad=True)


def _told(call: Callable[[], object]) -> str:
    try:
        return f"fine: {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _interrupted() -> list[str]:
    """Interrupt rank 0 while it waits for rank 1, and let both call again."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        store.wait(["interrupted"])
    texts = [_told(_scores)]
    store.set("interrupted", "")
    return [*texts, _told(_scores)]


def test_a_call_that_was_interrupted_is_not_gone_on_with():
    first, second = run_ranks(2, _interrupted, group_timeout_s=30)
    refused = "RankMismatch: kept_logprobs: a call over this process group was left half done "
    assert first[0] == "KeyboardInterrupt: "
    assert first[1].startswith(f"{refused}(KeyboardInterrupt); take a new process group on every")
    assert "PeerLost: kept_logprobs: rank 0 did not answer; rank 0: KeyboardInterrupt" in second[0]
    assert second[1].startswith(f"{refused}(PeerLost); take a new process group on every rank")


def _backward_of_one() -> str:
    """Rank 1 calls no backward."""
    leaf, store = _leaf(), dist.distributed_c10d._get_default_store()
    scores, told = _scores(leaf), ""
    if dist.get_rank() == 0:
        told = _told(scores.logprobs.sum().backward)
        store.set("told", "")
    store.wait(["told"])
    return told


def test_a_rank_that_calls_no_backward_is_named():
    told, _ = run_ranks(2, _backward_of_one, group_timeout_s=1)
    assert told.startswith(
        "PeerLost: kept_logprobs: rank 1 did not answer. If all ranks live, look"
    )
