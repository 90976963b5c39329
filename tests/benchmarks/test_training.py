"""Scores of a trainer beside those of all logits, of a toy in place of the bundled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lab.allocations import peak_bytes
from benchmarks.lab.harness import Run, execute
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT
from benchmarks.questions import training
from tests.support import toy_trunk
from tests.support.tiers import long
from tpsample.agreement.construction import cpu_backend
from tpsample.training import call

SIZES = (1, 8, toy_trunk.V)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "load", toy_trunk.load)
    monkeypatch.setattr(training, "SIZES", SIZES)
    monkeypatch.setattr(training, "AT_ONCE", 20)
    monkeypatch.setattr(call, "default_backend", lambda device: cpu_backend())  # no interpreter


@pytest.mark.parametrize("dtype", ["bf16", *long("fp16", "fp32")])
def test_ways_agree_and_rows_have_all_that_the_page_shows(dtype, tmp_path):
    result = execute(training.BENCHMARK, Run.small(dtype=dtype, repeats=1), tmp_path / RESULT)
    assert len(result.rows) == len(SIZES) * len(training.WAYS)
    for row in result.rows:
        assert row.keys() >= {view.y for view in training.BENCHMARK.views} | {"ids"}
        assert row["batch"] == 48 and row["ids"] <= row["different_ids"] <= toy_trunk.V
        own = row["candidate"] == training.OURS
        assert ((row["times_as_long"], row["times_the_memory"]) == (1, 1)) == own
    page = write_page(tmp_path).read_text()
    assert all(f"## {view.title}" in page for view in training.BENCHMARK.views)


def test_sets_have_the_likeliest_ids_and_the_drawn_one():
    model = toy_trunk.load(None, None, torch.float32)
    for size, tokens in zip(SIZES, training.written(model, 40), strict=True):
        logits = tokens.states @ tokens.weight.T
        assert tokens.sets.equal(logits.sort(dim=1, descending=True, stable=True)[1][:, :size])
        assert (tokens.sets == tokens.drawn).any(dim=1).all()


@pytest.mark.parametrize("part", ["logprobs", "entropies"])
def test_a_wrong_score_is_told(part, monkeypatch):
    own = training.kept_logprobs

    def wrong(*given: Any, **how: Any) -> Any:
        scores = own(*given, **how)
        return scores._replace(**{part: getattr(scores, part) + 0.001 * (not how["sparse"])})

    monkeypatch.setattr(training, "kept_logprobs", wrong)
    with pytest.raises(AssertionError, match=f"tpsample, dense gradient: {part} differ by 0.001"):
        list(training.rows(Run.small(dtype="fp32")))


@pytest.mark.parametrize("which", ["states", "weight"])
def test_a_wrong_gradient_is_told(which, monkeypatch):
    def wrong(*given: torch.Tensor) -> training.Scores:
        own = list(given)
        at = ["states", "weight"].index(which)
        own[at] = given[at] * 1.001 - 0.001 * given[at].detach()  # the same number
        return training.all_logits(*own)

    monkeypatch.setitem(training.WAYS, "all logits", wrong)
    with pytest.raises(AssertionError, match=f"all logits: gradient of {which} differ"):
        list(training.rows(Run.small(dtype="fp32")))


def test_peak_memory_is_the_most_that_is_held_at_once():
    def step() -> torch.Tensor:
        first = torch.zeros(1000, dtype=torch.float64)
        second = first.float()
        del first
        return second + torch.ones(1000)

    assert 12_000 <= peak_bytes(step, torch.device("cpu")) < 13_000
