"""Arguments that have no place in a call, on one rank alone: every rank raises, and goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import calls
from tests.support.calls import CALLS, FUNCTIONS, B, D, V, batch_of, head_of, outcome, params_of
from tests.support.ranks import run_ranks, same_on_ranks
from tpsample import LMHeadSampler, VocabShard, sample
from tpsample.training import KeptTokens, kept_logprobs

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call without and with their names."""
LOCAL = {"draw_seeds", "counters", "count_failed", "check", "refresh", "close"}
"""Methods of a sampler that wait for no other rank."""
METHODS: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "warm_up": LMHeadSampler.warm_up,
    "compare": LMHeadSampler.compare,
    "reset": LMHeadSampler.reset,
}
MAKERS: dict[str, Callable[..., Any]] = {
    "LMHeadSampler": LMHeadSampler,
    "sample": sample,
    "kept_logprobs": kept_logprobs,
}


def _right(name: str, rank: int) -> Given:
    """Return right arguments of a call, but for the sampler."""
    if name in CALLS:
        return (), {argument: each.right for argument, each in CALLS[name].items()}
    if name == "sample":
        return (torch.ones(B, D), head_of(rank), params_of()), {"positions": 0}
    if name == "kept_logprobs":
        sets, shard = KeptTokens.from_lists([[0, 1]] * B), VocabShard.even(V, rank, 2)
        drawn = torch.zeros(B, dtype=torch.int64)
        return (torch.ones(B, D), head_of(rank), drawn, sets, 1.0), {"shard": shard}
    if name == "LMHeadSampler":
        return (head_of(rank),), {"backend": "torch"}
    return ((["plain"],) if name == "warm_up" else ()), {}


def _wrong(name: str, mistake: str, given: tuple[Any, ...], named: dict[str, Any]) -> Given:
    """Return what a mistake makes of right arguments."""
    own = ("self", "sampler")
    first = [each for each in inspect.signature(_call(name)).parameters if each not in own][:1]
    return {
        "unknown": (given, named | {"softcaps": 3}),
        "missing": ((), {}),
        "surplus": ((*given, *[0] * 12), {}),
        "twice": (given or (0,), named | dict.fromkeys(first, 0)),
    }[mistake]


MISTAKES = ("unknown", "missing", "surplus", "twice")
NO_MISTAKE = {(name, "missing") for name in ("compare", "reset", "warm_up")} | {("reset", "twice")}
CASES = [
    (name, mistake)
    for name in (*MAKERS, *METHODS)
    for mistake in MISTAKES
    if (name, mistake) not in NO_MISTAKE
]


def _each_wrong() -> list[tuple[str, str]]:
    rank, told = dist.get_rank(), []
    sampler = calls.sampler_of()
    expected = calls.step(sampler)
    for name, mistake in CASES:
        of = (sampler,) if name in METHODS else ()
        given, named = _right(name, rank)
        if rank == 1:
            given, named = _wrong(name, mistake, given, named)
        told.append(outcome(lambda n=name, g=(*of, *given), k=named: _call(n)(*g, **k)))
        assert calls.step(sampler) == expected
    return told


def _call(name: str) -> Callable[..., Any]:
    return (MAKERS | METHODS)[name]


def test_every_method_is_covered() -> None:
    methods = {name for name, each in vars(LMHeadSampler).items() if inspect.isfunction(each)}
    public = {name for name in methods if name[0] != "_"} | {"step"}
    assert public == LOCAL | set(METHODS) - {"verify", "verify_logits", "sample_draft"}


def test_arguments_without_a_place_on_one_rank_are_told_to_every_rank() -> None:
    found = same_on_ranks(2, _each_wrong, group_timeout_s=20)
    for (name, mistake), (kind, text) in zip(CASES, found, strict=True):
        assert kind == "RankMismatch" and text.startswith("rank 1: "), f"{name} {mistake}: {text}"
        said = "not an argument of" if mistake == "unknown" else "; call it as "
        assert said in text or (name in CALLS and mistake == "missing"), f"{name} {mistake}: {text}"


def _without_a_sampler() -> list[tuple[str, str]]:
    """Return what this rank is told where rank 1 gives no sampler to verify or draft with.

    Both ranks have built two samplers of their group, and one of each rank alone.
    """
    samplers, told = [calls.sampler_of(), calls.sampler_of("p2p")], []
    alone = LMHeadSampler(torch.ones(V, D), group="alone", backend="torch")
    expected = [calls.step(each) for each in samplers]
    for sampler in samplers:
        for name in ("verify", "verify_logits", "sample_draft"):
            given = None if dist.get_rank() else sampler
            told.append(outcome(lambda n=name, g=given: calls.call(g, n)))  # type: ignore[misc]
            assert [calls.step(each) for each in samplers] == expected
    alone.close()
    return told


def test_a_call_without_a_sampler_on_one_rank_is_told_to_every_rank() -> None:
    told = ("RankMismatch", "rank 1: sampler: expected an LMHeadSampler, got None")
    assert same_on_ranks(2, _without_a_sampler, group_timeout_s=20) == [told] * 6


def _group_without_its_name() -> list[tuple[str, str]]:
    """Return what two of three ranks are told where one of them gives the group no or another name.

    The third rank takes part in nothing, so a rank that told the default group would wait for it.
    """
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank == 2:
        return []
    drawn, sets = torch.zeros(B, dtype=torch.int64), KeptTokens.from_lists([[0, 1]] * B)
    scored = (torch.ones(B, D), head_of(rank), drawn, sets, 1.0)
    shard = VocabShard.even(V, rank, 2)
    told = []
    ways: list[Given] = [((), {"group": group}), ((), {"process_group": group}), ((group,), {})]
    for way in ways:
        given, named = way if rank else ways[0]
        told += [
            outcome(lambda g=given, n=named: LMHeadSampler(head_of(rank), *g, **n)),  # type: ignore[misc]
            outcome(lambda g=given, n=named: kept_logprobs(*scored, *g, shard=shard, **n)),  # type: ignore[misc]
        ]
    return told


def test_a_group_under_a_wrong_name_is_the_group_that_is_told() -> None:
    first, second, _ = run_ranks(3, _group_without_its_name, group_timeout_s=20)
    assert first == second
    nothing = ("nothing raised", "")
    assert first[:2] == [nothing] * 2
    for kind, text in first[2:4]:
        assert kind == "RankMismatch" and text.startswith("rank 1: process_group: not an argument")
    for kind, text in first[4:]:
        assert kind == "RankMismatch" and text.startswith("rank 1: ") and "were given" in text


def _refused_without_a_wait() -> list[tuple[str, str]]:
    """Return what both ranks are told where rank 1 refuses what waits for no rank, and 0 steps."""
    sampler, told = calls.sampler_of(), []
    step = partial(calls.step, sampler)
    expected = step()
    for name, given, named in NOT_WAITING:
        refused = partial(getattr(sampler, name), *given, **named)
        told.append(outcome(refused if dist.get_rank() else step))
        assert step() == expected
    return told


NOT_WAITING: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("refresh", (torch.ones(1, 1),), {}),
    ("refresh", (), {"weight": head_of(1)}),
    ("refresh", (0, 0, 0), {}),
    ("draw_seeds", (batch_of(V + 1),), {}),
    ("draw_seeds", (), {}),
]


def test_a_refusal_of_a_call_that_waits_for_no_rank_is_told_to_every_rank() -> None:
    found = same_on_ranks(2, _refused_without_a_wait, group_timeout_s=20)
    assert {kind for kind, _ in found} == {"RankMismatch"}
    like, unknown, surplus, batch, missing = [text for _, text in found]
    assert like.startswith("rank 1: lm_head_weight: expected torch.float32 (5, 4)")
    assert unknown.startswith("rank 1: weight: not an argument of LMHeadSampler.refresh")
    assert surplus.endswith("call it as LMHeadSampler.refresh(lm_head_weight=…, bias=…)")
    assert batch.startswith("rank 1: batch: expected vocab_size 10")
    assert missing.endswith("call it as LMHeadSampler.draw_seeds(batch)")


ALONE: Mapping[str, tuple[Callable[[LMHeadSampler], object], str]] = {
    "one too many": (
        lambda sampler: sampler(torch.ones(B, D), batch_of(), 0, 2),  # type: ignore[misc]
        "LMHeadSampler.__call__() takes 4 positional arguments but 5 were given; call it as "
        "LMHeadSampler.__call__(hidden_states, batch, positions, *, num_samples=…, out=…)",
    ),
    "one that is missing": (
        lambda sampler: sampler.prompt_logprobs(torch.ones(B, D)),  # type: ignore[call-arg]
        "LMHeadSampler.prompt_logprobs() missing 1 required positional argument: 'next_token_ids'; "
        "call it as LMHeadSampler.prompt_logprobs(hidden_states, next_token_ids, *, top=…)",
    ),
    "an unknown name": (
        lambda sampler: sampler.compare(states=None),  # type: ignore[call-arg]
        "states: not an argument of LMHeadSampler.compare; did you mean hidden_states?",
    ),
    "a name where there is none": (
        lambda sampler: sampler.reset(steps=1),  # type: ignore[call-arg]
        "steps: not an argument of LMHeadSampler.reset; it has none",
    ),
    "a field of a request": (
        lambda _: LMHeadSampler(torch.ones(V, D), top_p=0.5),  # type: ignore[call-arg]
        "top_p: not an argument of LMHeadSampler; give it to each request, SamplingParams(top_p=…)",
    ),
    "an error of the call itself": (
        lambda sampler: sampler.warm_up(rows=3),  # type: ignore[arg-type]
        "rows: expected a list or a tuple, got 3",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_alone_raises_a_type_error(name: str) -> None:
    wrong, message = ALONE[name]
    sampler = LMHeadSampler(torch.ones(V, D), backend="torch")
    with pytest.raises(TypeError) as raised:
        wrong(sampler)
    assert str(raised.value) == message


def test_calls_show_the_arguments_that_they_take() -> None:
    for call in (*METHODS.values(), *MAKERS.values()):
        kinds = {each.kind for each in inspect.signature(call).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    parameters = inspect.signature(LMHeadSampler.__call__).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty]
    assert needed == ["self", "hidden_states", "batch", "positions"]
