"""A default device of torch, under which an engine builds its model, enters no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.mistakes import HIDDEN, WEIGHT, batch_of, half, tokens
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference, verify

V, D = 67, 8
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_p": 0.5, "min_p": 0.01},
    "penalties": {"frequency_penalty": 1.0, "logit_bias": {3: 2.0}},
    "masks": {"bad_words": [[1, 2], [3]], "min_tokens": 2, "stop_token_ids": [5]},
    "allowed": {"allowed_token_ids": range(9), "logprobs": 3},
    "without a seed": {"seed": None},
}


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_a_device_of_its_own_draws_the_same_tokens(kind, backend):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator)
    hidden_states = torch.randn(2, 2, D, generator=generator)
    drafts = torch.ones(2, 1, dtype=torch.int64)

    def drawn() -> list[Any]:
        params = [SamplingParams(**{"seed": row, **KINDS[kind]}) for row in range(2)]
        sampler = LMHeadSampler(weight, backend=backend, logit_softcap=30.0)
        batch = SamplingBatch.from_params(params, vocab_size=V, device="cpu")
        out = sampler(hidden_states[:, 0].contiguous(), batch, 3)
        batch.append(out.token_ids)
        batch.permute([1, 0])
        verified = verify(sampler, hidden_states, drafts, batch, 4)
        if kind == "without a seed":
            return [out.status.tolist(), len(set(out.seeds.tolist()))]
        return [out.token_ids.tolist(), verified.token_ids.tolist()]

    expected = drawn()
    with torch.device("meta"):
        assert drawn() == expected


def _exchanged(exchange: str) -> list[int]:
    batch = batch_of()
    with torch.device("meta"):
        return tokens(LMHeadSampler(half(dist.get_rank()), exchange=exchange), batch)


@pytest.mark.parametrize("exchange", ["collective", "peer"])
def test_ranks_exchange_the_same_words(exchange):
    right = reference.sample(HIDDEN @ WEIGHT.T, batch_of(), 0).token_ids.tolist()
    assert run_ranks(2, _exchanged, exchange) == [right, right]
