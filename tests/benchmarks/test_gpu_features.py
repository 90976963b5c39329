"""The section `features`: what it tries is tried, and what is wrong is named, all of it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import features
from benchmarks.gpu.goals import GOALS
from benchmarks.lab.allocations import noise_on_cpu
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from tpsample import SamplingBatch, SamplingParams

CPU = torch.device("cpu")
TRIED = (
    "launches",
    "allocations and waits",
    "odd shards",
    "every control, bf16",
    "every control, fp16",
    "every control, fp32",
    "slots, plain",
    "slots, controls",
    "slots, filters",
    "warm_up",
    "torch.compile",
)


UNSEEN = ("warm_up", "torch.compile")
"""Attempts in which both sides have the planted token. A planted step calls operators too."""


def _attempts(message: str) -> list[str]:
    return [name for name in TRIED if f"{name}: " in message]


def test_a_product_that_is_further_off_than_the_screen_assumes_is_seen(monkeypatch):
    problem = Problem.make(make_weight(1000, 64, CPU), 4)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        error, assumed = features.product_error(problem, dtype).split(", assumed ")
        assert float(error) < float(assumed)
    monkeypatch.setattr(features, "accumulation_error", lambda *_: -1.0)
    with pytest.raises(AssertionError, match="products are off by"):
        features.product_error(problem, torch.float32)


@pytest.mark.long
def test_wrong_tokens_are_seen_in_all_but_what_compares_no_token(wrong_token):
    facts = {}
    with pytest.raises(AssertionError) as raised:
        for fact in features.features(CPU, True):
            facts |= fact
    assert _attempts(str(raised.value)) == [name for name in TRIED if name not in UNSEEN]
    # The other facts are told all the same.
    assert set(facts) == {*UNSEEN, *(f"products, {name}" for name in features.DTYPES)}


def test_a_graph_that_forgets_controls_is_seen(monkeypatch):
    problem = Problem.make(make_weight(600, 32, CPU), 4)
    assert features._compiled(problem, True) == "aot_eager, 4 steps"
    monkeypatch.setattr(SamplingBatch, "_reads_tables", False)
    with pytest.raises(AssertionError, match=r"^every control, step 1, every control, step 2: ids"):
        features._compiled(problem, True)


def test_every_control_is_asked_for():
    asked = {name for controls in features.CONTROLS for name in controls}
    others = {"seed", "logprob_token_ids", "ties", "filter_order", "repetition_scope"}
    assert asked | others == set(SamplingParams.__dataclass_fields__)
    assert features.ODD_BOUNDS[0] % 4 and len(features.DTYPES) == 3


def test_wrong_logprobs_are_seen():
    values = torch.tensor([[-1.5, torch.nan, -torch.inf]])
    told, expected = (SimpleNamespace(values=values.clone()) for _ in range(2))
    features.same_logprobs(SimpleNamespace(logprobs=told), expected)
    told.values[0, 0] += 0.01
    with pytest.raises(AssertionError):
        features.same_logprobs(SimpleNamespace(logprobs=told), expected)


def test_a_step_that_allocates_is_seen():
    problem = Problem.make(make_weight(300, 16, CPU), 3)
    candidate = problem.sampled_by(make_sampler(problem.weight, 3))
    candidate.step()
    assert noise_on_cpu(candidate.step) == ""
    sampler = make_sampler(problem.weight, 3)

    def fresh():
        sampler(problem.hidden_states, problem.batch, 7)

    fresh()
    assert "empty" in noise_on_cpu(fresh)


def test_the_numbers_that_goals_need_come_first():
    found = (name for facts in features.features(CPU, True) for name in facts)
    goals = {goal.fact for goal in GOALS if goal.section == "features"}
    assert set(itertools.islice(found, 2)) == goals
