"""Ranks that work before they meet take as long as they need; one that dies there is named."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, own_sampler
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.virtual import assert_all_equal
from tpsample import PeerLost, RankMismatch
from tpsample.backends.numba_.kernels import compiled_ahead
from tpsample.ranks.bounded_store import BoundedStore
from tpsample.ranks.process import ranks_of
from tpsample.ranks.roll_call import GRACE_S

TIMEOUT_S = 1.0


def _work(seconds: float, die_after: float | None = None) -> Any:
    def work() -> None:
        if die_after is not None:
            time.sleep(die_after)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds * slowness())

    return work


def _meet_slowly() -> int:
    """Rank 1 works for much longer than a rank may be silent, then all exchange something."""
    ranks = ranks_of(None)
    ranks.prepare(_work(3 * TIMEOUT_S if ranks.rank == 1 else 0))
    return sum(int(each["rank"]) for each in ranks.gather({"rank": ranks.rank}))


def test_a_rank_that_works_longer_than_the_timeout_is_not_lost():
    assert run_ranks(3, _meet_slowly, group_timeout_s=TIMEOUT_S) == [3, 3, 3]


def _lose(rank_that_works: int | None) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 dies in its work; rank 2 may still work when rank 0 no longer waits."""
    ranks = ranks_of(None)
    work = _work(3 * TIMEOUT_S if ranks.rank == rank_that_works else 0)
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        ranks.prepare(_work(0, die_after=0.5) if ranks.rank == 1 else work)
    return str(lost.value), lost.value.ranks, time.monotonic() - began


@pytest.mark.parametrize("rank_that_works", [None, 2])
def test_a_rank_that_dies_in_its_work_is_named_in_time(rank_that_works):
    found = run_ranks(3, _lose, rank_that_works, group_timeout_s=TIMEOUT_S, victim=1)
    for rank in (0, 2):
        text, ranks, took = found[rank]
        assert ranks == (1,) and "rank 1 did not answer" in text
        if rank != rank_that_works:
            assert took < 0.5 + GRACE_S + (TIMEOUT_S + 1) * slowness()
    assert found[0][0] == found[2][0]


def _come_and_die() -> tuple[int, ...]:
    """Rank 1 comes to the meeting and dies there, while rank 2 works."""
    ranks = ranks_of(None)
    work = _work(4 * TIMEOUT_S if ranks.rank == 2 else 0)
    if ranks.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        ranks.prepare(work)
        ranks.gather({})
    if ranks.rank == 0:
        assert time.monotonic() - began < 1 + GRACE_S + (TIMEOUT_S + 1) * slowness()
    return lost.value.ranks


def test_a_rank_that_dies_while_it_waits_for_another_is_named_in_time():
    found = run_ranks(3, _come_and_die, group_timeout_s=TIMEOUT_S, victim=1)
    assert found[0] == found[2] == (1,)


def _count_calls() -> int:
    """Return the calls of the store of a rank that comes last, with nothing to do."""
    ranks, calls, ask = ranks_of(None), [], BoundedStore._ask

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return ask(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedStore, "_ask", count)
        if ranks.rank == 1:
            time.sleep(1 * slowness())
        ranks.prepare(lambda: None)
    return len(calls)


def test_ranks_with_nothing_to_do_take_one_round_of_the_store():
    assert run_ranks(2, _count_calls)[1] == 1


def _cannot_compile(case: Case) -> str:
    """Rank 1 has no room for compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            full = mock.Mock(side_effect=OSError("no space left on device"))
            patch.setattr(compiled_ahead, "compile_missing", full)
        with pytest.raises(RankMismatch) as refused:
            own_sampler(case.weight, backend="numba")
    return str(refused.value)


def test_a_rank_that_cannot_compile_is_told_to_all():
    found = run_ranks(2, _cannot_compile, Case.make(60, 3), group_timeout_s=TIMEOUT_S)
    assert found == ["rank 1: no space left on device"] * 2


def _one_is_wrong(case: Case) -> str:
    """Rank 0 is refused by itself, while rank 1 works."""
    ranks, compile_missing = ranks_of(None), compiled_ahead.compile_missing
    work = _work(2 * TIMEOUT_S if ranks.rank == 1 else 0)

    def compile_slowly(weight: torch.Tensor, **how: bool) -> None:
        work()
        compile_missing(weight, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_ahead, "compile_missing", compile_slowly)
        with pytest.raises(RankMismatch) as refused:
            own_sampler(case.weight, backend="numba", chunks=0 if ranks.rank == 0 else 1)
        sampler = own_sampler(case.weight, backend="numba")
        assert_all_equal([sampler(case.hidden_states, case.batch, case.positions)], case.oracle())
    return str(refused.value)


def test_a_rank_with_a_wrong_argument_is_told_of_after_the_others_have_worked():
    first, second = run_ranks(2, _one_is_wrong, Case.make(60, 3), group_timeout_s=TIMEOUT_S)
    assert first == second and first.startswith("rank 0: chunks")
