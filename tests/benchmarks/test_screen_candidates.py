"""The count of candidates: few where rows are peaked, all where nothing tells them apart."""

import pytest
import torch

from benchmarks.questions import screen_candidates
from tests.support.screening import problem


def test_few_candidates_and_their_groups_are_counted():
    case = problem("normal", 1000, 20, 64)
    found = screen_candidates.counts(case.weight, case.hidden_states, 1.0)
    assert 1 <= found["groups_mean"] <= found["candidates_mean"] < 5
    assert found["candidates_mean"] <= found["candidates_p99"] <= found["candidates_max"]
    assert 16 / 1000 <= found["share_read_by_16_rows"] < 0.6


def test_equal_rows_are_all_candidates():
    case = problem("normal", 1, 2, 32)
    found = screen_candidates.counts(case.weight.repeat(100, 1), case.hidden_states, 0.0)
    assert found["candidates_mean"] == 100 and found["groups_mean"] == 7


def test_a_winner_that_was_ruled_out_ends_the_run(monkeypatch):
    case = problem("normal", 500, 4, 32)

    def nothing_is_certain(weight, hidden):
        zeros = torch.zeros(len(hidden), len(weight))
        return zeros + 9, zeros

    monkeypatch.setattr(screen_candidates, "intervals", nothing_is_certain)
    with pytest.raises(AssertionError, match="winner"):
        screen_candidates.counts(case.weight, case.hidden_states, 0.0)
