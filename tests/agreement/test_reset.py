"""reset() recovers, and lets go of what it replaces: file descriptors and threads stay as many."""

import gc
import os
import socket
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.virtual_ranks import VirtualWorld, even_shards
from tests.support.calls import batch_of, outcome, sampler_of, step
from tests.support.cases import Case, own_sampler
from tests.support.limits import slowness
from tests.support.ranks import run_ranks, same_on_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, PeerLost, SamplingParams, VocabShard
from tpsample.core.word import pack
from tpsample.ranks import process, roll_call
from tpsample.ranks.bounded_store import BoundedStore

SETTLES_S = 20.0
"""How long old connections may stay: a thread lets go of them, which a busy machine delays."""


def _held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _most(held: list[tuple[int, int]]) -> tuple[int, int]:
    descriptors, threads = zip(*held, strict=True)
    return max(descriptors), max(threads)


def _settled(limits: tuple[int, int]) -> tuple[int, int]:
    """Return what is held once it is within the limits, or what is still held much later."""
    deadline = time.monotonic() + SETTLES_S
    while any(map(int.__gt__, held := _held(), limits)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def _resets(exchange: str, times: int, anew: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what is held after two resets and after many; a right step follows each.

    Args:
        anew: a new sampler with groups of its own is built and closed in place of each reset.
    """
    socket.gethostname = lambda: "ab"[dist.get_rank() % 2]
    case, held = Case.make(40, 3), []
    sampler = own_sampler(case.weight, exchange=exchange)
    for _ in range(times):
        if anew:
            sampler.close()
            del sampler
            sampler = own_sampler(case.weight, exchange=exchange)
        else:
            sampler.reset()
        out = sampler(case.hidden_states, case.batch, case.positions)
        assert torch.equal(out.token_ids, case.oracle().token_ids)
        held.append(_held())
    first = _most(held[:2])
    return first, _settled(first)


def _require_no_more(world_size: int, exchange: str, times: int, *, anew: bool = False) -> None:
    timeout_s = 60 + 2 * times
    for first, last in run_ranks(world_size, _resets, exchange, times, anew, timeout_s=timeout_s):
        assert all(map(int.__le__, last, first)), (first, last)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "times"), [(2, 6), *long((3, 200))])
@pytest.mark.parametrize("exchange", ["collective", "p2p", "two_level"])
def test_resets_hold_no_more_than_the_first(exchange, world_size, times):
    _require_no_more(world_size, exchange, times)


def _lost_and_found(backend: str) -> bool:
    """Rank 1 misses a step, and a gloo group does not recover from that."""
    case = Case.make(40, 3)
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=1))
    sampler = own_sampler(case.weight, group=group, exchange="collective")
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost):
            sampler(case.hidden_states, case.batch, case.positions)
    sampler.reset()
    out = sampler(case.hidden_states, case.batch, case.positions)
    return torch.equal(out.token_ids, case.oracle().token_ids)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", *long("gloo", "cpu:gloo")])
def test_a_reset_recovers_whatever_the_group_calls_its_backend(backend):
    assert run_ranks(2, _lost_and_found, backend) == [True, True]


def test_samplers_that_are_gone_hold_nothing():
    _require_no_more(2, "two_level", 5, anew=True)


@pytest.mark.parametrize("exchange", ["none", "peer"])
def test_a_reset_clears_the_words(exchange):
    """A word of a broken step would win every row of a captured step, which begins nothing."""
    case = Case.make(40, 3)
    world = VirtualWorld([VocabShard(0, 40)] if exchange == "none" else even_shards(40, 2))
    samplers = [
        LMHeadSampler(case.weight[s.start : s.stop], group=ranks, backend="triton")
        for s, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    left = pack(torch.tensor(1e30), torch.tensor(3))
    for sampler in samplers:
        sampler.exchange.words.fill_(left)
    for sampler in samplers:
        sampler.reset()
        assert not sampler.exchange.words.any()
    for out in world.step(samplers, case.hidden_states, case.batch, case.positions):
        assert torch.equal(out.token_ids, case.oracle().token_ids)


def _reset_again(case: Case) -> None:
    """Resets of rank 0 end: its store is silent, then rank 1 does not come. A reset of both
    recovers."""
    sampler = own_sampler(case.weight)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        soon = mock.patch.object(process, "group_timeout", lambda _: timedelta(seconds=0.3))
        with soon, mock.patch.object(roll_call, "GRACE_S", 0.2):
            silent = mock.patch.object(BoundedStore, "set", return_value=False)
            with (
                silent,
                pytest.raises(PeerLost, match=r"reset: the store .* did not answer within"),
            ):
                sampler.reset()
            with pytest.raises(PeerLost, match="reset: rank 1 did not come"):
                sampler.reset()
        store.set("told", "")
        time.sleep(0.3)  # until rank 1 is in its reset
    store.wait(["told"], timedelta(seconds=60 * slowness()))
    sampler.reset()
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert torch.equal(out.token_ids, case.oracle().token_ids)


def test_a_reset_that_fails_ends_and_the_next_one_recovers():
    run_ranks(2, _reset_again, Case.make(60, 3), group_timeout_s=3)


def _called_alone() -> list[str]:
    """Return how steps end after calls that rank 0 alone made, and those after what they advise."""
    sampler, told = sampler_of(), []
    unseeded = lambda: batch_of(rows=[SamplingParams(), SamplingParams()])  # noqa: E731
    for call in (sampler.refresh, lambda: sampler.draw_seeds(unseeded())):
        if dist.get_rank() == 0:
            call()
        told.append(outcome(lambda: step(sampler))[1].partition(", got")[0])
        sampler.reset()
        told.append(str(step(sampler)) + str(step(sampler, unseeded())))
    return told


def test_calls_that_one_rank_alone_made_end_no_sampler():
    refreshed, _, drawn, _ = same_on_ranks(2, _called_alone)
    assert "; call refresh() where it was called less often" in refreshed, refreshed
    assert drawn.endswith("how many seeds were drawn before; call reset() on all ranks"), drawn


def _reset_wrong_on_one_rank() -> list[str]:
    """Return what is told of resets that are wrong on rank 1; each sampler goes on."""
    rank, told = dist.get_rank(), []
    sampler, closed = sampler_of(), sampler_of()
    expected = step(sampler)
    if rank == 0:
        with pytest.raises(PeerLost):
            step(sampler)
    resets = [partial(sampler.reset, *["now"] * rank), closed.reset]
    closed.checks.closed = rank == 1
    for reset in resets:
        told.append(": ".join(outcome(reset)))
    sampler.reset()
    assert step(sampler) == expected
    return told


def test_a_reset_that_is_wrong_on_one_rank_is_told_to_every_rank():
    surplus, closed = same_on_ranks(2, _reset_wrong_on_one_rank, group_timeout_s=2)
    assert surplus.startswith("RankMismatch: rank 1: LMHeadSampler.reset() takes 1 positional")
    assert closed == "RankMismatch: rank 1: sampler: closed; build a new LMHeadSampler"
