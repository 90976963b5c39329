"""The first steps of a sampler compare the hidden states of its ranks, and later ones do not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import B, D, V, batch_of, outcome, sampler_of
from tests.support.ranks import same_on_ranks
from tpsample import Desync, SamplingBatch, SamplingParams, verify
from tpsample.agreement.step import Call

STATES = "hidden_states: must be the same on every rank, by digest; look for a missing all-reduce"


def _given(differ: bool, rows: int = B) -> torch.Tensor:
    """Hidden states, whose last row is another one on rank 1."""
    states = torch.arange(rows * D, dtype=torch.float32).view(rows, D).cos()
    if differ and dist.get_rank() == 1:
        states[-1, 0] += 1
    return states


def _told(exchange: str) -> list[tuple[str, str]]:
    sampler, found = sampler_of(exchange), []
    batch = batch_of()

    def step(differ: bool) -> tuple[str, str]:
        return outcome(lambda: sampler(_given(differ), batch, 0))

    found.append(step(True))  # nothing is counted as seen
    found.append(step(False))
    sampler.refresh()
    found.append(step(True))
    sampler.reset()
    found.append(step(True))
    sampler.warm_up(["plain"])
    found.append(step(True))
    found += [step(False) for _ in range(3)]
    found.append(step(True))
    return found


def test_hidden_states_that_differ_are_told_in_the_first_steps():
    found = same_on_ranks(2, _told, "collective")
    for place, (kind, text) in enumerate(found):
        if place in (0, 2, 3, 4):
            assert kind == "RankMismatch" and text.startswith(STATES), text
        else:
            assert kind == "nothing raised", text


def test_ranks_that_do_not_meet_on_the_host_compare_their_first_step():
    found = same_on_ranks(2, _told, "peer")
    assert [kind for kind, _ in found[:3]] == [Desync.__name__, "nothing raised", Desync.__name__]
    assert "were given other hidden states" in found[0][1] and "missing all-reduce" in found[0][1]
    assert [kind for kind, _ in found[5:]] == ["nothing raised"] * 4


def _rows_that_are_not_drawn() -> list[tuple[str, str]]:
    sampler = sampler_of()
    batch = SamplingBatch.of_slots(4, vocab_size=V)
    batch.put(1, SamplingParams(seed=3))
    padded = lambda: sampler(_given(True), batch.select(torch.tensor([1, -1])), 0)  # noqa: E731
    drafts = torch.full((B, 1), -1)
    states = torch.stack([_given(False), _given(True)], dim=1)  # of the token, then of no draft
    found = [outcome(padded), outcome(lambda: verify(sampler, states, drafts, batch_of(), 0))]
    states = states.flip(1)
    return [*found, outcome(lambda: verify(sampler, states, drafts, batch_of(), 0))]


def test_rows_that_are_not_drawn_may_have_any_hidden_states():
    padded, after, before = same_on_ranks(2, _rows_that_are_not_drawn)
    assert padded == after == ("nothing raised", "")
    assert before[0] == "RankMismatch" and before[1].startswith(STATES)


def _refreshed_alone(steps: int) -> list[tuple[str, str]]:
    """Return what a step tells, and what it tells once the rank that is behind has followed."""
    sampler, batch = sampler_of(), batch_of()
    for _ in range(steps):
        sampler(_given(False), batch, 0)
    found = []
    for rank in (1, 0):
        if dist.get_rank() == rank:
            sampler.refresh()
        found.append(outcome(lambda: sampler(_given(False), batch, 0)))
    return found


@pytest.mark.parametrize("steps", [1, 4])
def test_a_sampler_refreshed_on_one_rank_alone_is_told(steps):
    (kind, text), then = same_on_ranks(2, _refreshed_alone, steps)
    assert kind == "RankMismatch" and text.startswith("refreshes: must be the same"), text
    assert "call refresh() where it was called less often" in text, text
    assert text.endswith("got rank 0: 0, rank 1: 1"), text
    assert then == ("nothing raised", "")


def _digests() -> list[int]:
    """How often steps made a digest of hidden states."""
    sampler, counts = sampler_of(), []
    batch = batch_of(sampler.vocab_size)
    with mock.patch.object(Call, "drawn_states", return_value=None) as looked:
        for _ in range(5):
            sampler(_given(False), batch, 0)
            counts.append(looked.call_count)
    return counts


@pytest.mark.parametrize(("world_size", "counts"), [(2, [1, 2, 3, 3, 3]), (1, [0] * 5)])
def test_later_steps_look_at_no_hidden_states(world_size, counts):
    assert same_on_ranks(world_size, _digests) == counts
