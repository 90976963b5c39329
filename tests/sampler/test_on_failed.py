"""The token of a row that has none: -1, or what the caller of `LMHeadSampler` chose."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from tests.support.filtered import assert_same
from tests.support.virtual import small_tiles
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    Status,
    verify,
)

V, D, END = 41, 8, 7
BACKENDS = ("torch", "triton")
FAILED = [Status.NAN, Status.EMPTY, Status.OK] * 3
PARAMS = [
    *(SamplingParams(seed=row) for row in range(3)),
    *(SamplingParams(seed=row, top_p=0.8) for row in range(3)),
    *(SamplingParams(seed=row, top_k=4, logprobs=2) for row in range(3)),
]


def inputs() -> tuple[torch.Tensor, torch.Tensor, SamplingBatch]:
    """Hidden states and a batch whose rows have a NaN, no token left, or nothing amiss."""
    generator = torch.Generator().manual_seed(3)
    weight, hidden_states = (torch.randn(n, D, generator=generator) for n in (V, 9))
    hidden_states[::3, 0] = torch.nan
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V)
    batch.forced_token_ids = torch.tensor([-1, V, -1] * 3)  # an id from V on leaves none
    return weight, hidden_states, batch


def sampler_of(weight: torch.Tensor, backend: str, **arguments: Any) -> LMHeadSampler:
    return small_tiles(LMHeadSampler(weight, backend=backend, max_rows=36, **arguments))


def same_but_for_failed(out: SampleOutput, before: SampleOutput) -> None:
    """Two outputs differ in the token of the rows that failed, and in nothing else."""
    assert out.status.tolist() == FAILED and out.logprobs is not None
    failed = out.status != Status.OK
    assert (before.token_ids[failed] == -1).all()
    expected = dataclasses.replace(before, token_ids=before.token_ids.clone())
    expected.token_ids[failed] = END
    assert_same(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_samples", [None, 2])
def test_rows_that_fail_return_it_and_their_status_still_tells(backend, num_samples):
    weight, hidden_states, batch = inputs()
    out, before = (
        sampler_of(weight, backend, on_failed=on_failed)(
            hidden_states, batch, 5, num_samples=num_samples
        )
        for on_failed in (END, -1)
    )
    same_but_for_failed(out, before)


def test_fixed_rounds_and_logits_of_the_caller_return_it_too():
    weight, hidden_states, batch = inputs()
    sampler, plain = (sampler_of(weight, "torch", on_failed=token) for token in (END, -1))
    fixed = SamplingBatch.from_params(PARAMS, vocab_size=V, fixed_rounds=True)
    fixed.forced_token_ids = batch.forced_token_ids
    before = plain(hidden_states, batch, 5)
    same_but_for_failed(sampler(hidden_states, fixed, 5), before)
    logits = hidden_states @ weight.T
    found, expected = (each.sample_logits(logits, batch, 5) for each in (sampler, plain))
    same_but_for_failed(found, expected)
    assert sampler.counters()["failed_rows"] == 12
    sampler.count_failed(before.status)  # as who has read it from a GPU
    assert sampler.counters()["failed_rows"] == 18


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_a_verification_stops_at_a_failed_position_even_if_its_draft_is_that_token(backend, method):
    weight, hidden_states, _ = inputs()
    params = [SamplingParams(temperature=0.0, logprobs=1) for _ in range(3)]
    hidden_states = hidden_states[2:3].expand(9, D).clone().view(3, 3, D)
    hidden_states[0, 1, 0] = hidden_states[1, 0, 0] = torch.nan
    best = int((hidden_states[2, 2] @ weight.T).argmax())
    drafts = torch.tensor([[best, END], [END, END], [best, best]])
    samplers = [sampler_of(weight, backend, on_failed=on_failed) for on_failed in (END, -1)]
    out, before = (
        verify(
            sampler,
            hidden_states,
            drafts,
            SamplingBatch.from_params(params, vocab_size=V),
            4,
            method=method,
        )
        for sampler in samplers
    )
    assert [sampler.counters()["failed_rows"] for sampler in samplers] == [2, 2]
    assert before.token_ids.tolist() == [[best, -1, -1], [-1, -1, -1], [best] * 3]
    assert out.token_ids.tolist() == [[best, END, -1], [END, -1, -1], [best] * 3]
    for each in (out, before):
        assert each.num_accepted.tolist() == [1, 0, 2]
        assert each.status.tolist() == [Status.NAN, Status.NAN, Status.OK]
    assert torch.equal(out.logprobs.token_ids, before.logprobs.token_ids)


def test_the_first_row_without_a_token_is_told_of():
    weight, hidden_states, batch = inputs()
    sampler = sampler_of(weight, "torch")
    with pytest.warns(UserWarning, match=r"^status: row 0 has no token but -1, status NAN") as told:
        out = sampler(hidden_states, batch, 3)
        sampler(hidden_states, batch, 3)
    files = [each.filename for each in told if str(each.message).startswith("status")]
    assert files == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "status")
        named = sampler_of(weight, "torch", on_failed=END)(hidden_states, batch, 3)
    same_but_for_failed(named, out)


def test_rows_of_a_warm_up_fail_unnoticed():
    """Its examples together may leave no token, which is nobody's request."""
    weight, hidden_states, batch = inputs()
    sampler = LMHeadSampler(weight, backend="torch", max_rows=36)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "status")
        sampler.warm_up()
    assert sampler.counters()["failed_rows"] == 0 < sampler.counters()["steps"]
    with pytest.warns(UserWarning, match=r"^status: row 0 has no token but -1, status NAN"):
        sampler(hidden_states, batch, 3)
    assert sampler.counters()["failed_rows"] == 6
