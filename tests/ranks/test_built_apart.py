"""Ranks build a sampler together after one of them began another without its peers."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.calls import sampler_of, step
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tpsample import PeerLost, RankMismatch
from tpsample.ranks.process import ProcessRanks


def _begin_group(store: Path, rank: int, world_size: int) -> None:
    """Replace the default group by another one of the same name."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10 * slowness()),
    )


def _replaced(folder: Path) -> list[int]:
    """Rank 0 has built a sampler in an earlier group, and rank 1 knows nothing of that group."""
    rank = dist.get_rank()
    if rank == 0:
        _begin_group(folder / "alone", 0, 1)
        sampler_of()
    _begin_group(folder / "both", rank, 2)
    samplers = [sampler_of(), sampler_of()]
    assert step(samplers[0]) == step(samplers[1])
    return [sampler.ranks.roll.number for sampler in samplers]


def test_a_new_group_of_an_old_name_numbers_its_samplers_anew(tmp_path):
    assert run_ranks(2, _replaced, tmp_path) == [[1, 2]] * 2


def _refused() -> list[int]:
    """Rank 0 is refused a sampler, because it left a call of another one half done."""
    sampler = sampler_of()
    expected = step(sampler)
    if dist.get_rank() == 0:
        sampler.agreement.leave("interrupted", refused=False)
        with pytest.raises(RankMismatch, match=r"interrupted; call reset\(\) on every rank first"):
            sampler_of()
    sampler.reset()
    samplers = [sampler_of(), sampler_of()]
    assert step(samplers[0]) == step(samplers[1]) == expected
    return [sampler.ranks.roll.number for sampler in samplers]


def test_a_sampler_that_was_refused_on_one_rank_is_not_counted():
    assert run_ranks(2, _refused, group_timeout_s=10) == [[2, 3]] * 2


def _begun_alone() -> list[int]:
    """Rank 0 begins a sampler to which rank 1 does not come."""
    sampler = sampler_of()
    expected = step(sampler)
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost):
            sampler_of()
    sampler.reset()
    later = sampler_of()
    assert step(later) == step(sampler) == expected
    return [later.ranks.roll.number]


def test_a_sampler_that_one_rank_began_is_counted_by_all_after_a_reset():
    assert run_ranks(2, _begun_alone, group_timeout_s=1) == [[3]] * 2


def _begun_on_gpus() -> int:
    """Rank 0 began more samplers than rank 1, over a group that a reset connects to nobody."""
    ranks = ProcessRanks(dist.group.WORLD)
    ranks._backend = dist.Backend.NCCL
    ranks.shared.begun = 3 - dist.get_rank()
    ranks.renew()
    return ranks.shared.begun


def test_ranks_on_gpus_number_samplers_alike_after_a_reset():
    assert run_ranks(2, _begun_on_gpus, group_timeout_s=10) == [3, 3]
