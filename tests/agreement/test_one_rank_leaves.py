"""A rank that raises, makes another call, is interrupted, closes or resets, beside one that steps.

Wrong and different arguments are in `tests/messages/test_mistakes.py`, batches in
`test_batches_differ`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import (
    CALLS,
    B,
    D,
    V,
    batch_of,
    call,
    head_of,
    outcome,
    sampler_of,
    step,
)
from tests.support.limits import slowness
from tests.support.ranks import run_ranks, same_on_ranks
from tests.support.virtual import peer_of
from tpsample import LMHeadSampler, RankMismatch, Status


def _by_peers(cases: list[tuple[str, str, Any]]) -> list[tuple[str, str]]:
    """The rank that raises takes no further step until it is reset; the other loses it."""
    sampler, found = sampler_of("peer"), []
    peer_of(sampler).timeout_s = 1.0 * slowness()
    expected = step(sampler)
    for name, argument, value in cases:
        changes = {argument: value} if dist.get_rank() == 1 else {}

        def call_and_check(n: str = name, c: dict[str, Any] = changes) -> None:
            call(sampler, n, **c)
            sampler.check()

        found.append(outcome(call_and_check))
        if dist.get_rank() == 1:  # its words would meet rank 0's of another step
            with pytest.raises(RankMismatch, match=r"call reset\(\)"):
                step(sampler)
        else:
            out = sampler(torch.ones(B, D), batch_of(), 0)
            assert out.status.tolist() == [Status.PEER_LOST] * B
        sampler.reset()
        assert step(sampler) == expected
    return found


def test_a_step_by_peers_that_is_wrong_on_one_rank_is_told_to_the_other():
    cases = [("step", "hidden_states", torch.zeros(D)), ("step", "batch", None)]
    found = same_on_ranks(2, _by_peers, cases)
    for (_, argument, _), (kind, text) in zip(cases, found, strict=True):
        assert kind == "RankMismatch" and text.startswith(f"rank 1: {argument}")


def _raises_without_a_text(exchange: str) -> str:
    """Return what this rank is told of an error without a text on rank 1."""
    sampler = sampler_of(exchange)

    def call_and_check() -> None:
        if dist.get_rank():
            sampler.agreement.refuse(MemoryError())
        step(sampler)
        sampler.check()

    if exchange == "peer":
        peer_of(sampler).timeout_s = 1.0 * slowness()
    return outcome(call_and_check)[1]


@pytest.mark.parametrize("exchange", ["collective", "peer"])
def test_an_error_without_a_text_is_told_by_its_type(exchange):
    assert same_on_ranks(2, _raises_without_a_text, exchange) == "rank 1: MemoryError"


def _stays_away() -> tuple[str, str]:
    """Return what this rank is told where rank 1 takes no part in a step.

    After a reset this sampler, later ones and those that are reset as well step as before.
    """
    sampler = sampler_of()
    expected = step(sampler)
    found = outcome(lambda: None if dist.get_rank() else step(sampler))
    sampler.reset()
    later = sampler_of()
    assert step(later) == step(sampler) == expected
    later.reset()
    assert step(later) == step(sampler_of()) == expected
    return found


def test_a_rank_that_stays_away_is_named_with_where_to_look():
    (kind, where), _ = run_ranks(2, _stays_away, group_timeout_s=2)
    assert kind == "PeerLost"
    assert "If all ranks live, look for an error on rank 1, then call reset() on each" in where


def _other_calls() -> list[tuple[str, str]]:
    """Rank 1 makes another call than rank 0."""
    sampler, found = sampler_of(), []
    expected = step(sampler)
    calls: dict[str, Any] = {name: lambda n=name: call(sampler, n) for name in CALLS}
    calls["compare"] = sampler.compare
    for one in calls:
        for other in calls:
            found.append(outcome(calls[one if dist.get_rank() == 0 else other]))
            if one == other:
                assert found.pop()[0] == "nothing raised"
            assert step(sampler) == expected
    return found


def test_another_call_on_one_rank_raises_the_same_on_every_rank():
    found = same_on_ranks(2, _other_calls)
    assert len(found) == 42 and all(kind == "RankMismatch" for kind, _ in found)
    assert all(text.startswith("call: every rank must make the same call") for _, text in found)
    assert "rank 0: step, rank 1: compare" in found[5][1]


def _counted() -> list[int]:
    """Steps by number, after calls that emit no token, a verification, and a step refused."""
    sampler = sampler_of()
    counts: list[int] = []
    roll: Any = sampler.exchange.ranks.roll
    for one in (
        lambda: step(sampler),
        sampler.compare,
        lambda: call(sampler, "prompt_logprobs"),
        lambda: call(sampler, "sample_draft"),
        lambda: call(sampler, "verify"),
        lambda: sampler(torch.ones(B + dist.get_rank(), D), batch_of(), 0),
        lambda: step(sampler) if dist.get_rank() else sampler.compare(),
        lambda: step(sampler),
    ):
        outcome(one)
        counts.append(roll.step)
    return counts


def test_steps_are_counted_alike_on_every_rank_whatever_is_refused():
    assert run_ranks(2, _counted) == [[0, 0, 0, 0, 1, 1, 1, 2]] * 2


# --- leaving, closing, resetting


def _closed() -> list[tuple[str, str]]:
    sampler = sampler_of()
    if dist.get_rank() == 1:
        sampler.close()
    calls = [sampler.compare, *(lambda n=name: call(sampler, n) for name in CALLS)]
    return [outcome(each) for each in calls]


def test_a_sampler_closed_on_one_rank_is_told_to_all():
    told = "RankMismatch", "rank 1: sampler: closed; build a new LMHeadSampler"
    assert set(same_on_ranks(2, _closed)) == {told}


def test_a_closed_sampler_raises_on_a_rank_alone():
    sampler = LMHeadSampler(torch.randn(V, D))
    sampler.close()
    calls = sampler.compare, sampler.check, sampler.reset, sampler.refresh, sampler.__enter__
    for each in (lambda: step(sampler), *calls):
        with pytest.raises(RuntimeError, match="closed; build a new"):
            each()
    sampler.close()


def _alone() -> list[int]:
    """A process group of one rank, which has nobody to leave behind."""
    sampler = LMHeadSampler(torch.cat([head_of(0), head_of(1)]), backend="torch")
    expected = step(sampler)
    with pytest.raises(ValueError, match="hidden_states") as error:
        sampler(torch.ones(B + 1, D), batch_of(), 0)
    assert not isinstance(error.value, RankMismatch)
    with pytest.raises(ValueError, match="token_ids"):
        sampler.prompt_logprobs(torch.ones(1, D), torch.tensor([V]))
    assert step(sampler) == expected
    return expected


def test_a_group_of_one_rank_steps_on_after_an_error():
    run_ranks(1, _alone)
