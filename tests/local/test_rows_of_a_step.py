"""Filtered rows, rows with logprobs and plain ones share a step: each gets its own token."""

from typing import Any

import pytest
import torch

from tests.support.filtered import Rows, V, kinds_of_logits
from tpsample import LMHeadSampler, SamplingParams, VocabShard

REQUESTS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.7},
    {},
    {"top_k": 5},
    {"logprobs": 2},
    {"temperature": 0.0},
    {"min_p": 0.1},
)


@pytest.mark.parametrize("order", [(0, 1, 3), (1, 0, 0), (0, 2, 5), (5, 4, 3, 2, 1, 0)])
@pytest.mark.parametrize("given", [False, True], ids=["hidden states", "logits"])
def test_each_row_has_its_token(order, given):
    params = [SamplingParams(seed=3 + i, **REQUESTS[i]) for i in order]
    rows = Rows([kinds_of_logits()["normal"]], params)
    sampler = LMHeadSampler(**rows.head(VocabShard(0, V)))
    sample, inputs = sampler, rows.hidden_states
    if given:
        sample, inputs = sampler.sample_logits, rows.logits
    out = sample(inputs, rows.batch, rows.positions, num_samples=2)
    assert torch.equal(out.token_ids, rows.oracle(2).token_ids)
    assert not out.status.any()
