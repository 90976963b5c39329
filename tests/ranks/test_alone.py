"""A rank of a job that samples by itself."""

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, sample


def _alone(case: Case) -> None:
    """Only rank 1 samples; a collective would never end."""
    if dist.get_rank() == 1:
        sampler = LMHeadSampler(case.weight, group="alone")
        assert (sampler.ranks.rank, sampler.ranks.world_size) == (0, 1)
        assert sampler.exchange.name == "none"
        out = sampler(case.hidden_states, case.batch, case.positions)
        assert torch.equal(out.token_ids, case.oracle().token_ids)
        sampler.compare()
        sampler.close()
        once = sample(
            case.hidden_states, case.weight, case.params, positions=case.positions, group="alone"
        )
        assert torch.equal(once.token_ids, case.oracle().token_ids)
        with pytest.raises(ValueError, match="lm_head_weight: rank 0 needs 99 rows"):
            LMHeadSampler(case.weight, vocab_size=99, group="alone")  # nobody else is told
    dist.barrier()


def test_a_rank_of_two_samples_alone():
    run_ranks(2, _alone, Case.make(65, 6), group_timeout_s=30)
