"""The exchange of integers: order, exact sums, counted bytes."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler
from tpsample.ranks.process import device_of_texts, ranks_of
from tpsample.training import KeptTokens, kept_logprobs


def _count_and_sum() -> tuple[list, list, int, list, int]:
    ranks = ranks_of(None)
    rank = dist.get_rank()
    own = torch.tensor([[rank, 2**60], [3, -rank]])
    gathered = ranks.gather_integers(own.T.contiguous().T)
    few, sent = ranks.sum_integers(own[:, :1]).tolist(), ranks.bytes_sent
    many = ranks.sum_integers(torch.arange(40 * 67).view(40, 67) - rank)
    return gathered[:, 0].tolist(), few, sent, many.tolist(), ranks.bytes_sent - sent


def test_the_integer_exchange_gathers_in_rank_order_sums_exactly_and_counts_its_bytes():
    for gathered, summed, sent, many, sent_of_many in run_ranks(4, _count_and_sum):
        assert gathered == [[rank, 2**60] for rank in range(4)]
        assert summed == [[6], [12]]
        assert sent == 3 * 32 + 3 * 16
        assert many == (4 * torch.arange(40 * 67).view(40, 67) - 6).tolist()
        assert sent_of_many == 2 * 3 * 40 * 67 * 8 // 4, "a ring's, over 16 KB"


def _sends_texts_from() -> list[str]:
    """Where texts would be sent from with NCCL: the group's GPU, then the weight's."""
    ranks: Any = ranks_of(None)
    found = [device_of_texts(ranks, ranks.group)]
    ranks.home = torch.device("cuda", 1)
    with mock.patch.object(dist, "get_backend", return_value=dist.Backend.NCCL):
        found.append(device_of_texts(ranks, ranks.group))
        bound: Any = SimpleNamespace(bound_device_id=torch.device("cuda", 2))
        found.append(device_of_texts(ranks, bound))
    return [str(device) for device in found]


def test_texts_are_sent_from_the_gpu_of_the_weight_even_if_it_is_not_the_current_one():
    assert run_ranks(1, _sends_texts_from) == [["cpu", "cuda:1", "cuda:2"]]


def _leaves(folder: str) -> bool:
    """Connect two ranks, the first one late, and return whether it was connected on leaving."""
    connected = Path(folder) / "connected"
    if dist.get_rank() == 0:
        real = dist.ProcessGroupGloo

        def late(*args: Any) -> Any:
            made = real(*args)
            time.sleep(0.3)
            connected.touch()
            return made

        dist.ProcessGroupGloo = late
    ranks: Any = ranks_of(None)
    with ranks.during("a test"):
        ranks.subset("pair", (0, 1))
    return connected.exists()


def test_nobody_leaves_before_all_are_connected(tmp_path):
    """Else what a rank does next may close the connections that another still waits for."""
    assert run_ranks(2, _leaves, str(tmp_path)) == [True, True]


def _destroyed() -> list[tuple[str, str]]:
    """Build a sampler, and score kept tokens, over a group that was destroyed."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    weight, kept = torch.full((2, 3), float(rank)), KeptTokens.from_lists([[1]])
    sampler = LMHeadSampler(weight, vocab_size=4, group=group, backend="torch")
    dist.destroy_process_group(group)
    scored = torch.ones(1, 3), weight, torch.tensor([1]), kept, 1.0
    calls = (
        lambda: LMHeadSampler(weight, vocab_size=4, group=group, backend="torch"),
        lambda: kept_logprobs(*scored, shard=sampler.shard, group=group),
    )
    return [outcome(call) for call in calls]


def test_a_group_that_was_destroyed_is_refused_by_name():
    told = "group: expected a process group that torch.distributed has, got one that was destroyed"
    for of_rank in run_ranks(2, _destroyed, group_timeout_s=10):
        for kind, text in of_rank:
            assert kind == "ValueError" and text.startswith(told)
