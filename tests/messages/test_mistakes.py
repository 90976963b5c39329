"""Users who do something wrong are told the argument, what was expected, what came, and the way
out: alone, as one rank of several, and as ranks that differ.

Every rank raises the same text before anything is sent, no process ends, and the next step is
right.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import (
    CALLS,
    CONSTRUCTOR,
    FUNCTIONS,
    MAX_ROWS,
    D,
    V,
    call,
    outcome,
    sampler_of,
    step,
)
from tests.support.mistakes import (
    HIDDEN,
    REFERENCE,
    REQUESTS,
    SAMPLERS,
    STEPS,
    TOGETHER,
    batch_of,
    half,
    sampler_over,
)
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler, RankMismatch

ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, UserWarning)
ALONE: dict[str, tuple[Callable[[], object], str]] = {
    **REFERENCE,
    **REQUESTS,
    **SAMPLERS,
    **{
        name: (lambda made=made: made(sampler_over()), text) for name, (made, text) in STEPS.items()
    },
}
ARGUMENTS = {"LMHeadSampler": CONSTRUCTOR, **CALLS}
WRONG = [
    (name, argument, value)
    for name, arguments in ARGUMENTS.items()
    for argument, each in arguments.items()
    for value in each.wrong
]
DIFFERENT = [
    (name, argument, each.other, each.told)
    for name, arguments in ARGUMENTS.items()
    for argument, each in arguments.items()
    if each.told
]
NAMES = {"lm_head_weight": ("lm_head_weight", "hidden_size", "shard")}
"""By argument, what may be named in place of it."""


def begins(text: str, message: str) -> bool:
    """Whether a text is a message, or begins with one that ends in the middle."""
    return text.startswith(message) if message[-1] in " (" else text == message


def test_no_mistake_has_the_name_of_another():
    assert len(ALONE) == len(REFERENCE) + len(REQUESTS) + len(SAMPLERS) + len(STEPS)


# -- alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALONE)
def test_a_process_alone_is_told(name):
    make, message = ALONE[name]
    with warnings.catch_warnings(), pytest.raises(ERRORS) as raised:
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message='backend: "auto"')
        make()
    assert begins(str(raised.value), message), str(raised.value)
    assert not isinstance(raised.value, RankMismatch)  # one rank disagrees with nobody


@pytest.mark.parametrize(("name", "argument", "value"), [w for w in WRONG if w[0] == "step"])
def test_a_process_by_itself_raises_its_own_error(name, argument, value):
    sampler = LMHeadSampler(torch.zeros(V, D), max_rows=MAX_ROWS, backend="torch")
    with pytest.raises((TypeError, ValueError), match=f"{argument}|max_rows=8") as error:
        call(sampler, name, **{argument: value})
    assert not isinstance(error.value, RankMismatch)


# -- one rank of several -----------------------------------------------------------------------


def _steps_on_one_rank() -> list[str]:
    rank, told = dist.get_rank(), []
    sampler = LMHeadSampler(half(rank), backend="torch", max_rows=4)
    expected = sampler(HIDDEN, batch_of(), 0).token_ids
    for make, _ in STEPS.values():
        right = lambda _: sampler(HIDDEN, batch_of(), 0)  # noqa: E731
        told.append(outcome(lambda made=make if rank else right: made(sampler))[1])
        assert torch.equal(sampler(HIDDEN, batch_of(), 0).token_ids, expected)
    return told


def test_a_step_wrong_on_one_rank_is_told_to_all_in_the_same_words():
    for (_, message), text in zip(
        STEPS.values(), same_on_ranks(2, _steps_on_one_rank), strict=True
    ):
        assert begins(text, f"rank 1: {message}"), text


def _collective(exchange: str, cases: list[tuple[str, str, Any]]) -> list[tuple[str, str]]:
    """Each case on rank 1, every time followed by a step that is right on both."""
    sampler, found = sampler_of(exchange), []
    expected = step(sampler)
    for name, argument, value in cases:
        changes = {argument: value} if dist.get_rank() == 1 else {}
        found.append(outcome(lambda n=name, c=changes: call(sampler, n, **c)))
        assert step(sampler) == expected
    return found


@pytest.mark.parametrize("exchange", ["collective", "p2p"])
def test_a_call_wrong_on_one_rank_raises_the_same_on_every_rank(exchange):
    found = same_on_ranks(2, _collective, exchange, WRONG)
    for (name, argument, value), (kind, text) in zip(WRONG, found, strict=True):
        told = "max_rows" if argument == "num_samples" and value == 5 else argument
        assert kind == "RankMismatch", f"{name}: {text}"
        assert any(word in text for word in NAMES.get(told, (told,))), f"{name}: {text}"
        assert text.startswith("rank 1: ") or name == "LMHeadSampler", text


def test_every_argument_is_covered():
    for name, function in {**FUNCTIONS, "LMHeadSampler": LMHeadSampler.__init__}.items():
        arguments = set(inspect.signature(function).parameters) - {"self", "sampler", "unknown"}
        assert arguments == set(ARGUMENTS[name]), name


# -- ranks that differ -------------------------------------------------------------------------


def test_calls_that_differ_raise_the_same_naming_what_does():
    cases = [(name, argument, value) for name, argument, value, _ in DIFFERENT]
    found = same_on_ranks(2, _collective, "collective", cases)
    for (kind, text), (name, _, _, told) in zip(found, DIFFERENT, strict=True):
        assert kind == "RankMismatch" and told in text, text
        both = text.startswith(told) and "rank 0: " in text and "rank 1: " in text
        assert both or name == "LMHeadSampler", text


def _all_together() -> list[str]:
    """Return what this rank was told of each; the step after each is right."""
    rank = dist.get_rank()
    sampler, told = LMHeadSampler(half(rank), backend="torch"), []
    expected = sampler(HIDDEN, batch_of(), 0).token_ids
    for make, _ in TOGETHER.values():
        told.append(outcome(lambda made=make: made(sampler, rank))[1])
        assert torch.equal(sampler(HIDDEN, batch_of(), 0).token_ids, expected)
    return told


def test_ranks_are_told_the_same_and_go_on():
    for (_, message), text in zip(
        TOGETHER.values(), same_on_ranks(2, _all_together, group_timeout_s=20), strict=True
    ):
        assert begins(text, message) if message else not text, text
