"""The count of candidates: few where rows are peaked, all where nothing tells them apart."""

import pytest
import torch

from benchmarks.questions import screen_candidates
from tests.support.screening import problem


def test_few_candidates_and_their_groups_are_counted():
    case = problem("normal", 1000, 20, 64)
    found = screen_candidates.counts(case.weight, case.hidden_states, 1.0)
    ids, groups = found["candidates"], found["groups"]
    assert 1 <= groups["mean"] <= ids["mean"] < 5
    assert ids["mean"] <= ids["p99"] <= ids["most"]
    assert 1.6 <= groups["percent_of_16_rows"] < 60


def test_equal_rows_are_all_candidates():
    case = problem("normal", 1, 2, 32)
    found = screen_candidates.counts(case.weight.repeat(100, 1), case.hidden_states, 0.0)
    assert found["candidates"]["mean"] == 100 and found["groups"]["mean"] == 7


def test_a_winner_that_was_ruled_out_ends_the_run(monkeypatch):
    case = problem("normal", 500, 4, 32)

    def nothing_is_certain(weight, hidden):
        zeros = torch.zeros(len(hidden), len(weight))
        return zeros + 9, zeros

    monkeypatch.setattr(screen_candidates, "intervals", nothing_is_certain)
    with pytest.raises(AssertionError, match="winner"):
        screen_candidates.counts(case.weight, case.hidden_states, 0.0)
