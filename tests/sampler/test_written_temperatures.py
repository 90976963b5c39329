"""Any number that a caller writes into the temperatures of a batch has one meaning everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.oracle import Context, Request
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, Status, reference

WRITTEN = (0.0, 1e-45, 9e-6, -1.0, -math.inf, math.nan, 1e38, 3e38, math.inf)
V, D = 65, 16
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_k": 60, "top_p": 0.9},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"logprobs": 2, "top_p": 0.9},
)


def problem(kind: dict) -> tuple[torch.Tensor, torch.Tensor, SamplingBatch]:
    """A weight that is the first rows of a larger one, two rows per number, and their batch."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-3, 4, (200, D), generator=generator).float()[:V]
    hidden_states = torch.randint(-3, 4, (2 * len(WRITTEN), D), generator=generator).float()
    params = [SamplingParams(seed=i, **kind) for i in range(len(hidden_states))]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    batch.temperature.copy_(torch.tensor(2 * WRITTEN))
    return weight, hidden_states, batch


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["torch", "numba", "int8", "triton"])
def test_every_backend_takes_the_token_of_the_definition(backend, kind):
    weight, hidden_states, batch = problem(kind)
    logits = hidden_states @ weight.T
    expected = []
    for row, heat in enumerate(2 * WRITTEN):
        request = Request(seed=row, temperature=heat, **kind)
        expected.append(oracle.draw(logits[row].numpy(), request, Context(), seed=row, position=7))
    screening = "int8" if backend == "int8" else None
    sampler = LMHeadSampler(
        weight, vocab_size=V, backend="numba" if screening else backend, screening=screening
    )
    at_once = 2 if screening else len(hidden_states)  # screening reads the copy of few rows
    for first in range(0, len(hidden_states), at_once):
        rows = slice(first, first + at_once)
        own = SamplingBatch.from_params(
            [SamplingParams(seed=i, **kind) for i in range(*rows.indices(len(hidden_states)))],
            vocab_size=V,
        )
        own.temperature.copy_(batch.temperature[rows])
        out = sampler(hidden_states[rows], own, 7)
        assert out.token_ids.tolist() == [answer.token for answer in expected[rows]]
        status = [Status(each).name for each in out.status.tolist()]
        assert status == [answer.status for answer in expected[rows]]
    found = reference.sample(logits, batch, 7)
    assert found.token_ids.tolist() == [answer.token for answer in expected]


def test_masked_tokens_of_hot_rows_stay_masked():
    for backend in ("torch", "numba", "triton"):
        params = [SamplingParams(seed=i, allowed_token_ids=[3, 64]) for i in range(40)]
        batch = SamplingBatch.from_params(params, vocab_size=V)
        batch.temperature.fill_(math.inf)
        sampler = LMHeadSampler(problem({})[0], vocab_size=V, backend=backend)
        drawn = sampler(torch.ones(40, D), batch, 0).token_ids
        assert set(drawn.tolist()) == {3, 64}, backend
