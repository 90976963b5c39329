"""After a warm-up, requests of its kinds launch no kernel that was not launched then."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.launches import listed
from tests.support.cases import own_sampler
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler, RankMismatch, SamplingBatch, SamplingParams
from tpsample.request.kinds import KINDS

V, D = 400, 16
OTHERS = {
    "plain": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.5},
    "top_k, top_p": {"top_k": 256, "top_p": 0.99},
    "top_p in top_k": {"top_p": 0.7, "top_k": 350},
    "min_p": {"min_p": 0.3},
    "logprobs": {"logprobs": 3, "temperature": 0.5},
    "allowed ids": {"allowed_token_ids": list(range(3, 300, 7))},
    "bad words": {"bad_words": [[7], [2, 3, 4], [11, 12]]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [1, 4, 8]},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 4.0, 8: -3.0}},
}
"""Another request of each kind."""


def _weight() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def _step(sampler: LMHeadSampler, requests: list[dict], fixed_rounds: bool = False) -> None:
    rows = [SamplingParams(seed=row, **each) for row, each in enumerate(requests)]
    batch = SamplingBatch.from_params(
        rows, vocab_size=V, output_token_ids=[[1, 2, 3]] * len(rows), fixed_rounds=fixed_rounds
    )
    hidden = torch.randn(len(rows), D, generator=torch.Generator().manual_seed(1))
    sampler(hidden, batch, torch.arange(len(rows)) + 5)


@pytest.mark.parametrize("kind", KINDS)
def test_another_request_of_a_kind_launches_nothing_new(kind):
    sampler = LMHeadSampler(_weight(), backend="triton")
    with listed(run_them=True) as warm:
        sampler.warm_up([kind])
    with listed(run_them=True) as later:
        for fixed_rounds in (False, True):
            _step(sampler, [OTHERS[kind]] * 3, fixed_rounds)
    assert later and set(later) <= set(warm)


def test_a_mix_of_kinds_is_warm_too():
    kinds = ["top_k", "penalties", "allowed ids"]
    mixed = [OTHERS[kind] for kind in kinds]
    alone, together = (LMHeadSampler(_weight(), backend="triton") for _ in range(2))
    with listed(run_them=True) as warm:
        for kind in kinds:
            alone.warm_up([kind])
    with listed(run_them=True) as warm_together:
        together.warm_up(kinds)
    with listed(run_them=True) as later:
        _step(together, mixed)
    assert set(later) <= set(warm_together)
    assert not set(later) <= set(warm)  # the mix is a kernel of its own


def test_a_head_without_a_weight_is_warmed_up_by_logits():
    sampler = LMHeadSampler(torch.zeros(V, 0), vocab_size=V, backend="triton")
    with listed(run_them=True) as warm:
        sampler.warm_up(["plain", "top_p"])
    batch = SamplingBatch.from_params([SamplingParams(seed=1)] * 2, vocab_size=V)
    with listed(run_them=True) as later:
        sampler.sample_logits(torch.zeros(2, V), batch, 3)
    assert later and set(later) <= set(warm)


def test_an_unknown_kind_is_refused_before_a_step():
    sampler = LMHeadSampler(_weight())
    with pytest.raises(ValueError, match=r"^kinds: expected some of 'plain', .*, got 'topk'"):
        sampler.warm_up(["plain", "topk"])
    assert set(OTHERS) == set(KINDS)


def _warm_and_step() -> str:
    """Ranks warm up together, and step; then a kind is wrong on one of them."""
    with own_sampler(_weight()) as sampler:
        sampler.warm_up(list(KINDS))
        _step(sampler, [OTHERS["top_p"]])
        with pytest.raises(RankMismatch) as error:
            sampler.warm_up(["plain" if dist.get_rank() else "topk"])
        return str(error.value)


def test_ranks_warm_up_together_and_refuse_together():
    assert "kinds: expected" in same_on_ranks(2, _warm_and_step)
