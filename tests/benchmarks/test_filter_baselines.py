"""Baselines with filters draw what the filters keep, at the rates that the filters leave."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lab import baselines
from benchmarks.lab.problem import Problem
from benchmarks.questions.filters import SETTINGS
from tpsample import SamplingBatch, SamplingParams, reference

ROWS, V = 4000, 60
PROBLEM = Problem.make(torch.zeros(V, 4), 1)
FILTERS = [
    *(each for each in SETTINGS.values() if each.get("top_k", 0) <= V),
    {"min_p": 0.2},
    {"top_k": 10, "min_p": 0.2, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_sampler_draws_from_the_kept_set_alone_and_all_of_it(filters: dict) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, V)
    batch = SamplingBatch.from_params([SamplingParams(**filters)], vocab_size=V)
    kept = reference.kept_mask(logits, batch)[0]
    law = logits[0].masked_fill(~kept, -torch.inf).softmax(dim=0)
    for name, sample in baselines.samplers(PROBLEM, **filters).items():
        ids = sample(logits.expand(ROWS, V))
        rates = torch.bincount(ids, minlength=V) / ROWS
        assert not rates[~kept].any(), name
        assert (rates - law).abs().sum() / 2 < 0.05, name


def test_a_filter_has_the_samplers_that_can_do_it() -> None:
    def names(**filters: float) -> set[str]:
        return set(baselines.samplers(PROBLEM, **filters))

    assert names(top_p=0.9) == {"sort"}
    assert names(top_k=5) == names(top_k=5, top_p=0.9) == {"sort", "topk"}
    assert names(min_p=0.1) == {"sort", "mask"}
