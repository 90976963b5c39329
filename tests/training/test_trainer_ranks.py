"""A rank that leaves a call of a trainer is named, and nothing follows what it left half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tpsample import VocabShard
from tpsample.training import KeptLogprobs, KeptTokens, kept_logprobs

V, D = 20, 4


def _scores(states: torch.Tensor | None = None, wanted: bool = False) -> KeptLogprobs:
    generator = torch.Generator().manual_seed(0)
    drawn, weight = torch.randn(3, D, generator=generator), torch.randn(V, D, generator=generator)
    shard = VocabShard.even(V, dist.get_rank(), 2)
    rows = weight[shard.start : shard.stop].clone().requires_grad_(wanted)
    kept = KeptTokens.from_lists([[3, 5], None, [19, 0, 7]])
    arguments = drawn if states is None else states, rows, torch.tensor([5, 2, 0]), kept, 0.7
    return kept_logprobs(*arguments, shard=shard)


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


def _differ() -> list[str]:
    """Call backward on rank 1 otherwise than on rank 0, in several ways."""
    rank = dist.get_rank()
    first, second = _scores(_leaf()), _scores(2 * _leaf())
    texts = [_told((first, second)[rank].logprobs.sum().backward)]
    texts.append(_told(lambda: _scores() if rank else second.logprobs.sum().backward()))
    texts.append(_told(lambda: ((1 + rank) * _scores(_leaf()).entropies.sum()).backward()))
    weighted = _scores(wanted=True)
    texts.append(_told((weighted.logprobs * torch.tensor([1, 0, 2 - rank])).sum().backward))
    texts.append(_told(lambda: _scores(wanted=rank == 1)))
    with torch.inference_mode(rank == 1):
        drawn = torch.ones(3, D)
    texts.append(_told(lambda: _scores(drawn, wanted=True)))
    scores = _scores(_leaf())
    texts.append(_told(lambda: scores.logprobs.sum().backward(create_graph=rank == 1)))
    broken = _scores(_leaf()).logprobs * (torch.nan if rank else 1)
    texts.append(_told(broken.sum().backward))
    texts.append(_told((_scores(_leaf()).logprobs.sum() * (1 + 1e-7 * rank)).backward))
    return texts


DIFFER = [
    "call: every rank must make the same call, got rank 0: the backward of kept_logprobs number 1, "
    "rank 1: the backward of kept_logprobs number 2",
    "call: every rank must make the same call, got rank 0: the backward of kept_logprobs number 2, "
    "rank 1: kept_logprobs",
    "gradient of entropies: row 0: must be the same on every rank, got rank 0: 1.0, rank 1: 2.0; "
    "compute the same loss on each",
    "gradient of logprobs: row 2: must be the same on every rank, got rank 0: 2.0, rank 1: 1.0; "
    "compute the same loss on each",
    "gradient of lm_head_weight: must be the same on every rank, got rank 0: False, rank 1: True",
    "rank 1: hidden_states: is a tensor of inference mode, which autograd cannot keep for "
    "backward; pass hidden_states.clone(), made outside of inference mode",
    "rank 1: kept_logprobs has no second derivatives; call backward without create_graph=True",
    "gradient of logprobs: row 0: must be the same on every rank, got rank 0: 1.0, rank 1: nan; "
    "compute the same loss on each",
]


def test_a_backward_that_differs_on_one_rank_is_refused_on_all():
    for texts in run_ranks(2, _differ, group_timeout_s=30):
        assert texts == [*(f"RankMismatch: {text}" for text in DIFFER), "fine: None"]


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
