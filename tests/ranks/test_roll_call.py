"""A roll call names who is missing, with a store that may lose its answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tpsample import PeerLost
from tpsample.ranks import process, roll_call
from tpsample.ranks.ranks import Shared
from tpsample.ranks.roll_call import RollCall

STORE = "the store of the process group does not answer either"


@pytest.fixture
def roll(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the roll call of a rank of three, whose peers never write."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: store)
    monkeypatch.setattr(roll_call, "GRACE_S", 0.1)

    def make(rank: int) -> RollCall:
        found = RollCall(SimpleNamespace(), rank, 3)
        found.step = 28
        return found

    return make


def _answers(roll: RollCall, rank: int) -> None:
    """Let a peer answer the roll call."""
    text = json.dumps({"step": 28, "unheard": ()})
    roll._store.set(roll._key("here", rank), text)


def test_who_does_not_answer_is_named_and_never_oneself(roll: Any) -> None:
    calling = roll(1)
    _answers(calling, 0)
    lost = calling.lost()
    assert lost.ranks == (2,) and "exchange: rank 2 did not answer in step 28; " in str(lost)


def test_before_the_first_step_no_step_is_named(roll: Any) -> None:
    """A call that is no step, such as `prompt_logprobs`, may come first."""
    calling = roll(1)
    calling.step = -1
    lost = calling.lost()
    assert lost.step is None and "step" not in str(lost)


def test_where_all_others_are_missing_the_network_is_named(roll: Any) -> None:
    lost = roll(1).lost()
    assert lost.ranks == (0, 2)
    expected = "ranks 0, 2 did not answer in step 28, and no other rank did, so the network"
    assert expected in str(lost)


@pytest.mark.parametrize(("rank", "named"), [(0, ()), (1, (0,))])
def test_a_store_that_has_not_this_ranks_own_word_is_what_is_lost(
    rank: int, named: tuple[int, ...], roll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling = roll(rank)
    monkeypatch.setattr(calling._store, "texts", lambda keys: [None] * len(keys))
    lost = calling.lost()
    assert (lost.ranks, lost.step) == (named, 28) and STORE in str(lost)
    # The same where the store is silent from the start, and where ranks begin anew.
    monkeypatch.setattr(calling._store, "set", lambda *_: False)
    assert calling.lost().ranks == named
    with pytest.raises(PeerLost, match=r"reset: .* did not answer") as raised:
        calling.begin_anew(0.0)
    assert raised.value.ranks == named
    monkeypatch.setattr(calling._store, "set", lambda *_: True)
    monkeypatch.setattr(calling._store, "has", lambda *_: False)
    with pytest.raises(PeerLost, match=r"reset: the store .* did not answer") as raised:
        calling.begin_anew(0.0)
    assert raised.value.ranks == named


def test_after_a_reset_the_text_says_since_when_steps_are_counted(roll: Any) -> None:
    calling = roll(1)
    _answers(calling, 0)
    assert "in step 28; tokens from step 28 on" in str(calling.lost())
    for rank in (0, 2):
        calling._store.set(calling._key("anew", rank), "")
    calling.begin_anew(0.0)
    _answers(calling, 0)
    text = str(calling.lost())
    assert "in step 28 since the last reset; tokens from that step on are not" in text


def test_ranks_that_come_with_the_last_look_are_not_missing(
    roll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling = roll(1)
    for rank in (0, 2):
        calling._store.set(calling._key("anew", rank), "")
    answers = iter([False, False])  # a store that is slow once, until the time is up
    real = calling._store.has
    monkeypatch.setattr(calling._store, "has", lambda *keys: next(answers, None) or real(*keys))
    monkeypatch.setattr(roll_call, "GRACE_S", 0.0)
    calling.begin_anew(0.0)
    assert calling._generation == 1


def test_a_rank_that_gave_up_a_reset_is_waited_for(roll: Any) -> None:
    early, late = roll(0), roll(1)
    early._store.set(early._key("anew", 2), "")
    with pytest.raises(PeerLost, match="reset: rank 1 did not come within 0 s"):
        early.begin_anew(0.0)
    with pytest.raises(PeerLost, match="reset: ranks 0, 2 did not come within 0 s"):
        late.begin_anew(0.0)


def test_ranks_of_an_attempt_that_one_gave_up_meet_in_the_next(roll: Any) -> None:
    """Rank 2 waits while rank 0 gives up, then ranks 1 and 0 come."""
    early, late, waiting = roll(0), roll(1), roll(2)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(waiting.begin_anew, 10.0)
        with pytest.raises(PeerLost, match="reset: rank 1 did not come within 0 s"):
            early.begin_anew(0.0)
        second = pool.submit(late.begin_anew, 10.0)
        with pytest.raises(NotDone):
            second.result(timeout=0.3)
        assert not first.done()
        early.begin_anew(10.0)
        first.result(timeout=30), second.result(timeout=30)
    assert early._generation == late._generation == waiting._generation == 2


def test_a_rank_that_came_before_is_not_named(roll: Any) -> None:
    """Ranks 0 and 2 wait for rank 1; rank 0 gives up first."""
    early, waiting = roll(0), roll(2)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(waiting.begin_anew, 0.5)
        with pytest.raises(PeerLost, match="reset: rank 1 did not come"):
            early.begin_anew(0.2)
        with pytest.raises(PeerLost, match="reset: rank 1 did not come within 1 s"):
            later.result()


def test_a_rank_whose_attempt_was_decided_without_it_follows(roll: Any) -> None:
    early, late = roll(0), roll(1)
    for rank in (0, 2):
        early._store.set(early._key("anew", rank), "")
    late.begin_anew(0.0)
    with pytest.raises(PeerLost, match="reset: ranks 1, 2 did not come within 0 s"):
        early.begin_anew(0.0)
    assert early._generation == late._generation == 1


def test_ranks_that_meet_but_do_not_connect_are_lost(
    roll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling, connecting = roll(1), Mock(side_effect=dist.DistStoreError("wait timeout after 1s"))
    for rank in (0, 2):
        _answers(calling, rank)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    monkeypatch.setattr(dist, "ProcessGroupGloo", connecting)
    monkeypatch.setattr(process, "group_timeout", lambda _: timedelta(seconds=1))
    ranks: Any = SimpleNamespace(
        group=None, roll=calling, shared=Shared(), rank=1, world_size=3, _members=(0, 1, 2)
    )
    ranks._own, ranks._name, ranks._backend = None, "gloo/all/0-1-2", dist.Backend.GLOO
    with pytest.raises(PeerLost, match=r"gave up or was too late.*call reset\(\) on each"):
        process.ProcessRanks.connect(ranks)


def test_an_error_while_a_graph_is_captured_is_no_lost_peer(
    roll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling, device = roll(1), torch.device("cpu")
    with pytest.raises(PeerLost), calling.called_on_error(device):
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(roll_call, "capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="is capturing"), calling.called_on_error(device):
        raise RuntimeError("operation not permitted when stream is capturing")
