"""Every way to make a call from stored logits returns what the reference returns, or its law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lab.problem import Problem, WrongToken
from benchmarks.lab.requests import REQUESTS
from benchmarks.questions import kinds, kinds_baselines
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference

ROWS, V, CAP = 4000, 60, 20
FIELDS = {name: its for name, its in REQUESTS.items() if its.get("top_k", 0) <= V}
PROMPT, OUTPUT = torch.tensor([[3, 5, 5, 9]]), torch.tensor([[9, 11, 9]])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _made(name: str, samples: int = 1, cap: int = 0) -> tuple[Any, Tensor, SamplingBatch]:
    """Return what each way returns for equal rows, their logits, and one row of the batch."""
    logits = 2 * torch.randn(1, V)
    before = {"prompt_token_ids": PROMPT.tolist(), "output_token_ids": OUTPUT.tolist()}
    params = [SamplingParams(**FIELDS[name])]
    batch = SamplingBatch.from_params(params, vocab_size=V, **before)
    its = PROMPT.expand(ROWS, -1), OUTPUT.expand(ROWS, -1)
    ways = kinds_baselines.of_step(FIELDS[name], samples, cap, *its)
    return {w: way(logits.repeat(ROWS, 1)) for w, way in ways.items()}, logits, batch


@pytest.mark.parametrize(
    ("name", "samples"), [*((name, 1) for name in FIELDS), ("plain", 8), ("top_p 0.9", 8)]
)
def test_tokens_follow_the_law(name: str, samples: int) -> None:
    made, logits, batch = _made(name, samples)
    kept, processed = (
        f(logits, batch)[0] for f in (reference.kept_mask, reference.processed_logits)
    )
    temperature = FIELDS[name].get("temperature", 1.0) or 1e-3
    law = (processed / temperature).masked_fill(~kept, -torch.inf).softmax(dim=0)
    for way, found in made.items():
        shape = (ROWS, samples) if temperature > 1e-3 else (ROWS, 1)
        assert found[0].shape == shape, way
        rates = torch.bincount(found[0].flatten(), minlength=V) / found[0].numel()
        assert not rates[~kept].any(), way
        assert (rates - law).abs().sum() / 2 < 0.05, way


@pytest.mark.parametrize("name", [name for name in FIELDS if "logprobs" in FIELDS[name]])
def test_logprobs_are_those_of_the_reference(name: str) -> None:
    made, logits, batch = _made(name)
    for way, (token_ids, own, ranks, first, ids) in made.items():
        right = reference.logprobs(logits, batch, token_ids[:1, 0])
        assert torch.cat([token_ids, ids], dim=1)[0].tolist() == right.token_ids[0].tolist(), way
        values = torch.cat([own, first], dim=1)[0].double()
        torch.testing.assert_close(values, right.values[0], rtol=0, atol=1e-5)
        assert ranks[0] == right.ranks[0, 0], way


@pytest.mark.parametrize("name", ["top_p 0.1", "top_k 50", "top_p 0.9"])
def test_kept_sets_are_those_of_the_reference(name: str) -> None:
    made, logits, batch = _made(name, cap=CAP)
    kept = reference.kept_mask(logits, batch)[0]
    law = logits[0].masked_fill(~kept, -torch.inf).log_softmax(dim=0)
    for way, (_, sizes, ids, masses) in made.items():
        assert (sizes == kept.sum()).all(), way
        assert len(ids) == ROWS * int(kept.sum()) * bool(kept.sum() <= CAP), way
        assert kept[ids].all(), way
        torch.testing.assert_close(masses, law[ids])


def test_a_prompt_has_the_logprobs_of_the_reference() -> None:
    logits, came = torch.randn(3, V), torch.tensor([[4], [5], [6]])
    params = [SamplingParams(logprobs=5)] * 3
    batch = SamplingBatch.from_params(params, vocab_size=V)
    right = reference.logprobs(logits, batch, came[:, 0])
    for own, ranks, first, ids in (w(logits) for w in kinds_baselines.of_prompt(came, 5).values()):
        values = torch.cat([own, first], dim=1).double()
        torch.testing.assert_close(values, right.values, rtol=0, atol=1e-5)
        assert torch.equal(torch.cat([came, ids], dim=1), right.token_ids)
        assert torch.equal(ranks, right.ranks[:, 0])


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_verified_tokens_follow_the_law(method: str) -> None:
    logits = 2 * torch.randn(4, V)
    drafts = logits[:3].argmax(dim=1).unsqueeze(0)
    law = logits[0].softmax(dim=0)
    for way, make in kinds_baselines.of_verification(drafts.expand(ROWS, -1), method).items():
        tokens, accepted = make(logits.repeat(ROWS, 1))
        assert {0, 1, 2, 3} == set(accepted.tolist()), way
        first = torch.where(accepted > 0, drafts[0, 0], tokens[:, 0])
        rates = torch.bincount(first, minlength=V) / ROWS
        assert (rates - law).abs().sum() / 2 < 0.05, way


def test_a_call_is_compared_with_all_that_the_reference_returns() -> None:
    problem = Problem.make(torch.randn(V, 8), 3).filtered(top_k=5, logprobs=2)
    its: Any = {"vocab_size": V, "kept_cap": CAP}
    batch = SamplingBatch.from_params(problem.params, **its)
    given = batch, problem.positions
    out = LMHeadSampler(problem.weight)(problem.hidden_states, *given)
    logits = reference.logits(problem.hidden_states, problem.weight)
    right, mask = reference.sample(logits, *given), reference.kept_mask(logits, batch)
    kinds.compare(out, right)
    kinds.compare_kept(out.kept, mask)
    with pytest.raises(WrongToken, match="kept sets"):
        kinds.compare_kept(out.kept, mask.roll(1, dims=1))
    for wrong in (out.token_ids, out.logprobs.ranks, out.logprobs.values):
        wrong[2] += 1
        with pytest.raises(WrongToken):
            kinds.compare(out, right)
        wrong[2] -= 1
