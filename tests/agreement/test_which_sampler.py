"""Ranks that call different samplers, or build one while another steps: every rank raises the same,
no process ends, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import B, D, V, head_of, outcome, sampler_of, step
from tests.support.ranks import run_ranks, same_on_ranks
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.distributed import Job
from tpsample.ranks.process import ProcessRanks


def _mine(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[str, str]:
    """The outcome of one call on rank 0 and of another one on rank 1."""
    return outcome(second if dist.get_rank() else first)


def _wide(max_rows: int) -> LMHeadSampler:
    return LMHeadSampler(head_of(dist.get_rank()), max_rows=max_rows, backend="torch")


def _steps_of(sampler: LMHeadSampler, rows: int) -> list[int]:
    params = [SamplingParams(seed=row, top_p=0.9) for row in range(rows)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    return sampler(torch.ones(rows, D), batch, 0).token_ids.tolist()


def _two_samplers(rows: int, exchange: str) -> list[tuple[str, str]]:
    """The target's step on rank 0 and the draft's on rank 1, then the other way round."""
    if exchange == "two_level":
        import socket

        socket.gethostname = lambda: "one host"
    target, draft = sampler_of(exchange), _wide(4 * rows)
    expected = step(target), _steps_of(draft, rows)
    found = []
    for calls in (
        (lambda: step(target), lambda: _steps_of(draft, rows)),
        (lambda: _steps_of(draft, rows), lambda: step(target)),
        (lambda: step(target), lambda: step(draft)),
        (lambda: step(target), draft.compare),
    ):
        found.append(_mine(*calls))
        assert (step(target), _steps_of(draft, rows)) == expected
    return found


@pytest.mark.parametrize("rows", [B, 5000])
def test_samplers_called_in_another_order_raise_on_every_rank(rows):
    found = same_on_ranks(2, _two_samplers, rows, "collective")
    assert [kind for kind, _ in found] == ["RankMismatch"] * 4
    assert found[2][1] == (
        "sampler: every rank must call the same one, in the same order; they are numbered as "
        "built, got rank 0: 1, rank 1: 2"
    )
    assert found[3][1].startswith("call: every rank must make the same call, got rank 0: step")


def _beside_a_step() -> list[tuple[str, ...]]:
    sampler, found = sampler_of(), []
    job = Job(rank=dist.get_rank(), world_size=2)
    expected = step(sampler)

    def told(calls: tuple[Callable[[], Any], Callable[[], Any]]) -> tuple[str, ...]:
        kind, text = _mine(*calls)
        assert step(sampler) == expected
        # The ranks count their samplers alike, because a roll call goes by that number.
        return kind, text, str(sampler_of().ranks.roll.number)

    for other in (
        lambda: sampler_of(),
        lambda: sampler.compare(),
        lambda: job.gather("x" * 9000),
    ):
        for calls in ((lambda: step(sampler), other), (other, lambda: step(sampler))):
            found.append(told(calls))
    return found


def test_what_else_is_collective_beside_a_step_raises_on_every_rank():
    found = same_on_ranks(2, _beside_a_step, group_timeout_s=10)
    for place, other in enumerate(("building a sampler", "compare", "gather")):
        told = "call: every rank must make the same call, got rank "
        (*first, _), (*second, _) = found[2 * place : 2 * place + 2]
        assert tuple(first) == ("RankMismatch", f"{told}0: step, rank 1: {other}")
        assert tuple(second) == ("RankMismatch", f"{told}0: {other}, rank 1: step")


def _beside_each_other() -> list[tuple[str, str]]:
    sampler, job = sampler_of(), Job(rank=dist.get_rank(), world_size=2)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: sampler_of(),
        lambda: sampler.compare(),
        lambda: job.gather("x" * 9000),
    )
    pairs = [(one, other) for one in calls for other in calls if one is not other]
    return [_mine(*pair) for pair in pairs]


def test_collective_calls_that_are_no_steps_are_told_apart():
    found = same_on_ranks(2, _beside_each_other)
    assert {kind for kind, _ in found} == {"RankMismatch"} and len(found) == 6


def _left_by_another() -> list[tuple[str, str]]:
    """Rank 1 leaves a step of one sampler half done, and calls another one of the same group."""
    one, other = sampler_of(), _wide(5000)
    expected, run = step(one), one.pipeline.stored_logits

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    if dist.get_rank() == 1:
        one.pipeline.stored_logits = fail
    found = [outcome(lambda: _steps_of(one, B))]
    one.pipeline.stored_logits = run
    if dist.get_rank() == 1:
        found.append(outcome(lambda: _steps_of(other, 5000)))
    for sampler in (one, other):
        sampler.reset()
    assert step(one) == step(other) == expected
    return found


def test_a_step_left_half_done_holds_up_the_other_samplers_of_its_group():
    first, second = run_ranks(2, _left_by_another, group_timeout_s=2)
    assert first == [("PeerLost", first[0][1])] and "rank 1: MemoryError: no memory" in first[0][1]
    assert second[0] == ("MemoryError", "no memory")
    assert second[1][0] == "RankMismatch" and "call reset() on every rank first" in second[1][1]


def _over_other_connections(exchange: str) -> list[tuple[str, str]]:
    """One sampler has connections of its own, because it was reset or has two levels."""
    import socket

    socket.gethostname = lambda: f"host {dist.get_rank()}"
    one, other = sampler_of(exchange), sampler_of()
    one.reset()
    expected = step(one)
    found = [_mine(lambda: step(one), lambda: step(other))]
    for sampler in (one, other):
        sampler.reset()
    assert step(one) == step(other) == expected
    return found


@pytest.mark.parametrize("exchange", ["collective", "two_level"])
def test_samplers_with_connections_of_their_own_are_told_apart_once_they_waited(exchange):
    found = run_ranks(2, _over_other_connections, exchange, group_timeout_s=2)
    assert [kind for ((kind, _),) in found] == ["RankMismatch"] * 2
    assert found[0][0][1] == (
        "sampler: every rank must call the same one, in the same order; they are numbered as "
        "built; rank 0 in sampler 1, rank 1 in sampler 2 waited for the others; call reset() of "
        "both on every rank"
    )
    assert found[1] == found[0]


def _interrupted_in_between(build: bool) -> list[tuple[str, str]]:
    """Ctrl-C on rank 1 while all build a sampler or gather; then it calls an older sampler."""
    sampler, job = sampler_of(), Job(rank=dist.get_rank(), world_size=2)
    expected = step(sampler)
    found = []
    collective = sampler_of if build else lambda: job.gather("x")
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ProcessRanks, "gather", mock.Mock(side_effect=KeyboardInterrupt("^C")))
            collective()
    else:
        found.append(outcome(collective))
    if dist.get_rank() == 1:
        found += [outcome(lambda: step(sampler)), outcome(sampler_of)]
    sampler.reset()
    assert step(sampler) == step(sampler_of()) == expected
    return found


@pytest.mark.parametrize("build", [True, False], ids=["build", "gather"])
def test_a_rank_interrupted_while_it_builds_sends_nothing_before_reset(build):
    first, second = run_ranks(2, _interrupted_in_between, build, group_timeout_s=1)
    assert first == [("PeerLost", first[0][1])] and "rank 1: KeyboardInterrupt: ^C" in first[0][1]
    assert [kind for kind, _ in second] == ["RankMismatch"] * 2
    assert all(text.startswith("KeyboardInterrupt: ^C; call reset()") for _, text in second)
