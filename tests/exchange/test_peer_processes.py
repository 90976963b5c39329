"""The `peer` exchange between processes that share memory."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, own_sampler
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.virtual import assert_all_equal, peer_of
from tpsample import LMHeadSampler, PeerLost, RankMismatch, Status


def _random_steps(case: Case, num_steps: int) -> None:
    rank = dist.get_rank()
    sampler = own_sampler(case.weight, exchange="peer", chunks=2)
    peer_of(sampler).epoch.fill_(2044)
    same, own = random.Random(7), random.Random(rank)
    for number in range(num_steps):
        some = case.rows(same.sample(range(8), same.randint(1, 8)))
        some.positions.add_(number)
        if own.random() < 0.4:
            time.sleep(own.random() * 0.1)
        assert_all_equal([sampler(some.hidden_states, some.batch, some.positions)], some.oracle())
    sampler.check()
    dist.barrier()
    assert (peer_of(sampler).memory.own == 0).all()
    sampler.close()
    with pytest.raises(RankMismatch, match="closed"):
        sampler(case.hidden_states, case.batch, case.positions)


@pytest.mark.parametrize("world_size", [3, *long(2, 4)])
def test_processes_with_random_delays(world_size):
    run_ranks(world_size, _random_steps, Case.make(60, 8), 20)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("tpsample-")]


def _lose_rank_1(case: Case) -> str:
    rank, sampler = dist.get_rank(), own_sampler(case.weight, exchange="peer")
    message = ""
    if rank != 1:
        peer_of(sampler).timeout_s = 2.0
        output = sampler(case.hidden_states, case.batch, case.positions)
        assert (output.status == Status.PEER_LOST).all() and (output.token_ids == -1).all()
        with pytest.raises(PeerLost) as lost:
            sampler.check()
        message = str(lost.value)
    sampler.exchange.reset()
    peer_of(sampler).timeout_s = 30.0
    output = sampler(case.hidden_states, case.batch, case.positions)
    assert_all_equal([output], case.oracle())
    return message


def test_a_process_that_skips_a_step_is_named_and_reset_recovers():
    messages = run_ranks(3, _lose_rank_1, Case.make(60, 4))
    for rank in (0, 2):
        assert "rank 1 did not answer in step 0" in messages[rank]


def _peer_by_torch() -> str:
    weight = torch.zeros(4, 8)
    with pytest.raises(ValueError) as error:
        LMHeadSampler(weight, exchange="peer", backend="torch")
    return str(error.value)


def test_peer_needs_a_kernel_on_every_rank():
    messages = run_ranks(2, _peer_by_torch)
    assert messages[0] == messages[1]
    assert 'backend "torch" has no kernel that writes to peers' in messages[0]
