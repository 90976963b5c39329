"""Ranks that die or stay away: every survivor says who, in time, and no token is half true.

The short matrix is a line through it; `pytest -m long` walks all of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, own_sampler
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.virtual import assert_all_equal, peer_of
from tpsample import LMHeadSampler, PeerLost, RankMismatch, Status
from tpsample.ranks.process import ranks_of
from tpsample.ranks.roll_call import GRACE_S

PHASES = ("construction", "mid-step", "between steps")
EXCHANGES = ("collective", "p2p", "peer")
GROUP_TIMEOUT_S, PEER_TIMEOUT_S = 20.0, 4.0
VICTIM, LAST_STEP = 1, 2
"""The victim is killed in or after step 2, counted from 0."""


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _make(case: Case, exchange: str, **arguments: Any) -> LMHeadSampler:
    if exchange == "two_level":
        socket.gethostname = lambda: "aabb"[dist.get_rank()]
    sampler = own_sampler(case.weight, exchange=exchange, chunks=2, **arguments)
    if exchange == "peer":
        peer_of(sampler).timeout_s = PEER_TIMEOUT_S * slowness()
    return sampler


def _kill_one(case: Case, exchange: str, phase: str) -> dict[str, Any]:
    """Steps until one is lost; what this rank returned as OK, and how it learned of the loss."""
    dying = dist.get_rank() == VICTIM
    if dying and phase == "construction":
        # Before the first word of the ranks, or in the middle where there are more.
        if exchange == "peer":
            pytest.MonkeyPatch().setattr("tpsample.exchange.peer.peer_memory", _die)
        else:
            pytest.MonkeyPatch().setattr("tpsample.sampler.agree", _die)
    tokens: dict[int, list[int]] = {}
    began = time.monotonic()
    try:
        sampler = _make(case, exchange)
        for step in range(LAST_STEP + 3):
            if dying and step == LAST_STEP and phase == "mid-step":
                sampler.local.best_words = _die
            if dying and step == LAST_STEP and phase == "mid-push":
                _reach_only_rank_0(sampler)
            if dying and step == LAST_STEP + 1 and phase == "between steps":
                _die()
            began = time.monotonic()
            out = sampler(case.hidden_states, case.batch, case.positions + step)
            if (out.status == Status.OK).all():
                tokens[step] = out.token_ids.tolist()
            sampler.check()
    except PeerLost as lost:
        took = time.monotonic() - began
        return {"text": str(lost), "ranks": lost.ranks, "at": lost.step, "s": took, "ok": tokens}
    raise AssertionError("nothing raised")


def _reach_only_rank_0(sampler: LMHeadSampler) -> None:
    """Die in the next step when its words are in the inbox of rank 0 and in no other."""
    memory = peer_of(sampler).memory
    nowhere, run = torch.zeros_like(memory.own), sampler.local.best_words
    memory.addresses[1:] = nowhere.data_ptr()

    def push(*arguments: Any) -> None:
        run(*arguments)
        _die()

    sampler.local.best_words = push


def _oracle(case: Case, step: int) -> list[int]:
    later = Case(case.hidden_states, case.weight, case.params, case.positions + step)
    ids: list[int] = later.oracle().token_ids.tolist()
    return ids


SHORT = [
    (2, "collective", "construction"),
    (4, "collective", "mid-step"),
    (3, "p2p", "mid-step"),
    (4, "two_level", "mid-step"),
    (2, "p2p", "between steps"),
    (2, "peer", "construction"),
    (3, "peer", "mid-push"),
]


EVERYWHERE = [
    *itertools.product([2, 4, 8], EXCHANGES, PHASES),
    (3, "peer", "mid-step"),
    (4, "peer", "mid-push"),
    (8, "peer", "mid-push"),
]


@pytest.mark.parametrize(
    ("world_size", "exchange", "phase"),
    [*SHORT, *long(*(each for each in EVERYWHERE if each not in SHORT))],
)
def test_survivors_of_a_killed_rank_name_it(world_size, exchange, phase):
    case = Case.make(60, 3)
    reports = run_ranks(
        world_size,
        _kill_one,
        case,
        exchange,
        phase,
        timeout_s=60 + 10 * world_size,
        group_timeout_s=GROUP_TIMEOUT_S,
        victim=VICTIM,
    )
    alive = [report for rank, report in enumerate(reports) if rank != VICTIM]
    # An interpreted step itself takes a while, all the more where ranks share two cores.
    limit_s = PEER_TIMEOUT_S + world_size if exchange == "peer" else GROUP_TIMEOUT_S
    for report in alive:
        assert report["ranks"] == (VICTIM,), report
        assert report["s"] < GRACE_S + slowness() * (limit_s + 1), report
        for step, token_ids in report["ok"].items():
            assert token_ids == _oracle(case, step), f"step {step}"
    assert len({report["text"] for report in alive}) == 1, alive
    # A step that one survivor has and another lacks is one that all were told to discard.
    for step in range(LAST_STEP + 3):
        have = [step in report["ok"] for report in alive]
        if any(have) and not all(have):
            assert all(report["at"] is not None and report["at"] <= step for report in alive), alive
    done = {"construction": 0, "between steps": LAST_STEP + 1}.get(phase, LAST_STEP)
    told = phase == "mid-push"  # rank 0 alone
    assert [len(report["ok"]) for report in alive] == [done + told, *[done] * (len(alive) - 1)]
    assert {report["at"] for report in alive} == {None if phase == "construction" else done}


def _stay_away(case: Case, exchange: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 does not come to a step; then all reset and go on."""
    sampler = _make(case, exchange)
    found: tuple[str, tuple[int, ...]] = ("", ())
    assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    if dist.get_rank() != 1:
        with pytest.raises(PeerLost) as lost:
            sampler(case.hidden_states, case.batch, case.positions)
            sampler.check()
        found = str(lost.value), lost.value.ranks
        assert len(sampler.counters()["lost_ranks"]) == 1
    sampler.reset()
    for _ in range(2):
        assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    sampler.check()
    return found


@pytest.mark.parametrize("exchange", ["p2p", "peer", "two_level", *long("collective")])
def test_a_rank_that_stays_away_is_named_and_reset_recovers(exchange):
    found = run_ranks(3, _stay_away, Case.make(60, 3), exchange, group_timeout_s=5)
    for rank in (0, 2):
        assert found[rank][1] == (1,)
        assert "rank 1 did not answer" in found[rank][0]


def _build_late(case: Case) -> str:
    """Rank 1 comes to a constructor when the others have given up."""
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(2 * slowness() + GRACE_S + 1 if rank == 1 else 0)
    with pytest.raises(PeerLost) as lost:
        _make(case, "collective")
    ready = dist.distributed_c10d._get_default_store()
    ready.set(f"ready {rank}", "")
    ready.wait([f"ready {other}" for other in range(dist.get_world_size())])
    group = dist.new_group(timeout=timedelta(seconds=60 * slowness()))
    sampler = _make(case, "collective", group=group)
    assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    return str(lost.value)


def test_ranks_that_did_not_meet_in_a_constructor_meet_over_a_new_group():
    """There is no sampler yet whose reset would help."""
    for told in run_ranks(3, _build_late, Case.make(60, 3), group_timeout_s=2):
        assert "take a new process group; else restart the job" in told


def _cut_off(case: Case) -> tuple[str, float]:
    """Rank 2 holds the store of the others, and is stopped while rank 0 misses a step."""
    rank, timeout = dist.get_rank(), timedelta(seconds=slowness())
    server = None if rank < 2 else dist.TCPStore("127.0.0.1", 0, is_master=True)
    found = [server and server.port, os.getpid()]
    dist.broadcast_object_list(found, src=2)
    if server is not None:
        server.wait(["done 0", "done 1"], timedelta(seconds=240 * slowness()))
        return "", 0.0
    port, holder = found
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    sampler = _make(case, "collective")
    assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    text, took = "", 0.0
    if rank == 1:
        os.kill(holder, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerLost) as lost:
            sampler(case.hidden_states, case.batch, case.positions)
        text, took = str(lost.value), time.monotonic() - began
        threading.Timer(3, os.kill, (holder, signal.SIGCONT)).start()  # it is back in the reset
    sampler.reset()
    assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    store.set(f"done {rank}", "")
    return text, took


def test_a_rank_that_is_cut_off_from_the_store_says_so_in_time_and_reset_waits_for_it():
    _, (text, took), _ = run_ranks(3, _cut_off, Case.make(60, 3))
    assert "the store of the process group on 127.0.0.1 does not answer either" in text
    assert took < GRACE_S + slowness() * 2


def _fail_in_a_step(case: Case, exchange: str, error: type[BaseException]) -> str:
    """Rank 1 fails behind the checks, where its peers already wait for it."""
    sampler = _make(case, exchange)

    def fail(*_: Any) -> None:
        raise error("planted")

    text = ""
    if dist.get_rank() == 1:
        failing = mock.patch.object(sampler.local, "best_words", fail)
        with failing, pytest.raises(error, match="planted"):
            sampler(case.hidden_states, case.batch, case.positions)
        with pytest.raises(RankMismatch, match=r"planted; call reset\(\) on every rank"):
            sampler(case.hidden_states, case.batch, case.positions)
    else:
        with pytest.raises(PeerLost) as lost:
            sampler(case.hidden_states, case.batch, case.positions)
            sampler.check()
        text = str(lost.value)
    sampler.reset()
    assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    return text


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("exchange", ["collective", *long("peer")])
def test_a_rank_that_fails_inside_a_step_says_why(exchange, error):
    text = run_ranks(2, _fail_in_a_step, Case.make(60, 3), exchange, error, group_timeout_s=3)[0]
    assert "rank 1" in text and f"{error.__name__}: planted" in text


def _wait_for_a_gpu() -> tuple[str, str]:
    """Let `check` wait as on a GPU, with a stand-in for the event that never comes."""
    ranks = ranks_of(None)
    if ranks.rank == 1:
        ranks.roll.write_reason("rank 1: planted", refused=False)
        time.sleep(1.5 + GRACE_S)
        ranks.roll.write_reason("rank 1: wrong", refused=True)
        dist.barrier()
        return "", ""
    ranks.roll.wait_until(lambda: True, 0)
    with pytest.raises(PeerLost) as lost:
        ranks.roll.wait_until(lambda: False, 0.5)
    time.sleep(2)
    with pytest.raises(RankMismatch) as refused:
        ranks.roll.wait_until(lambda: False, 60)
    dist.barrier()
    return str(lost.value), str(refused.value)


def test_the_wait_for_a_gpu_ends_and_says_why():
    lost, refused = run_ranks(2, _wait_for_a_gpu)[0]
    assert "rank 1 did not answer" in lost and "planted" in lost
    assert refused == "rank 1: wrong"


def _close_one(case: Case, exchange: str) -> tuple[str, float]:
    sampler = _make(case, exchange)
    sampler(case.hidden_states, case.batch, case.positions)
    store = dist.distributed_c10d._get_default_store()  # a barrier would meet the step's messages
    if dist.get_rank() == 1:
        sampler.close()
        store.wait(["told"], timedelta(seconds=60))
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        sampler(case.hidden_states, case.batch, case.positions + 1)
        sampler.check()
    took = time.monotonic() - began
    store.set("told", "")
    return str(lost.value), took


@pytest.mark.parametrize("exchange", ["collective", *long("p2p", "peer")])
def test_a_sampler_that_one_rank_closes_is_told_as_that(exchange):
    text, took = run_ranks(2, _close_one, Case.make(60, 3), exchange, group_timeout_s=60)[0]
    assert "rank 1: closed its sampler" in text
    assert took < 30
