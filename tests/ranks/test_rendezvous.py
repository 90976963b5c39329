"""Several ranks in one process: they meet in turn, and filters and logprobs work on them."""

import threading
from functools import partial

import pytest
import torch

from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support.cases import uneven_shards
from tests.support.filtered import Rows, V, kinds_of_logits
from tests.support.virtual import assert_all_equal, step, virtual
from tpsample import SamplingParams

KINDS = kinds_of_logits()


def _sum(meeting: VirtualWorld, rank: int, times: int) -> list[int]:
    sums = []
    for turn in range(times):
        sums.append(int(sum(meeting.gather(rank, torch.tensor(10**rank * turn)))))
    return sums


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_every_rank_gets_what_every_rank_gave(world_size):
    meeting = VirtualWorld([])
    ones = int("1" * world_size)
    for _ in range(3):
        results = meeting.run([partial(_sum, meeting, rank, 20) for rank in range(world_size)])
        assert results == [[ones * turn for turn in range(20)]] * world_size
    assert not meeting.running


def test_never_do_two_run_at_once():
    meeting, inside, most = VirtualWorld([]), threading.Semaphore(1), []

    def body(rank: int) -> None:
        for _ in range(50):
            most.append(inside.acquire(blocking=False))
            inside.release()
            meeting.gather(rank, torch.zeros(()))

    meeting.run([partial(body, rank) for rank in range(4)])
    assert all(most) and len(most) == 200


def test_an_error_on_one_rank_is_raised_and_stops_the_others():
    meeting = VirtualWorld([])

    def body(rank: int) -> None:
        meeting.gather(rank, torch.zeros(()))
        if rank == 1:
            raise KeyError("rank 1")
        meeting.gather(rank, torch.zeros(()))

    for _ in range(2):
        with pytest.raises(KeyError, match="rank 1"):
            meeting.run([partial(body, rank) for rank in range(3)])


@pytest.mark.parametrize("early", [0, 2])
def test_ranks_that_do_not_meet_equally_often_are_told(early):
    meeting = VirtualWorld([])

    def body(rank: int) -> None:
        for _ in range(1 if rank == early else 2):
            meeting.gather(rank, torch.zeros(()))

    with pytest.raises(RuntimeError, match="did not make the same calls"):
        meeting.run([partial(body, rank) for rank in range(3)])


def test_a_virtual_rank_alone_refuses_to_exchange_integers():
    rows = Rows([KINDS["normal"]], [SamplingParams(seed=1, top_p=0.5)])
    world, samplers = virtual(rows, uneven_shards(V, 2))
    with pytest.raises(RuntimeError, match=r"VirtualWorld\.step or \.run"):
        samplers[0].prompt_logprobs(rows.hidden_states, torch.tensor([3]))
    assert_all_equal(step(world, samplers, rows), rows.oracle())
