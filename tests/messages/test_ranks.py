"""All ranks are told the same of a mistake that one of them made, and go on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.mistakes import HIDDEN, WEIGHT, batch_of, half, said, tokens
from tests.support.ranks import run_ranks
from tests.support.wrong_ranks import FOLLOWED_BY_RANKS, TOGETHER
from tpsample import LMHeadSampler, reference


def _all_together() -> dict[str, tuple[str, bool]]:
    """Return what this rank was told of each, and whether the step after it was right."""
    rank = dist.get_rank()
    sampler = LMHeadSampler(half(rank), backend="torch")
    expected = sampler(HIDDEN, batch_of(), 0).token_ids
    found = {}
    for name, (call, _) in TOGETHER.items():
        text = said(lambda call=call: call(sampler, rank))
        right = torch.equal(sampler(HIDDEN, batch_of(), 0).token_ids, expected)
        found[name] = (text, right)
    return found


def test_ranks_are_told_the_same_and_go_on() -> None:
    first, second = run_ranks(2, _all_together)
    assert first == second
    for name, (_, message) in TOGETHER.items():
        text, right = first[name]
        assert (text[: len(message)] if message.endswith(" ") else text, right) == (message, True)


def _advised() -> dict[str, list[int]]:
    """Return the tokens of the samplers that this rank builds as it is told."""
    rank = dist.get_rank()
    return {name: tokens(build(rank)) for name, build in FOLLOWED_BY_RANKS.items()}


def test_advice_to_ranks_leads_to_the_right_tokens() -> None:
    first, second = run_ranks(2, _advised)
    right = reference.sample(HIDDEN @ WEIGHT.T, batch_of(), 0).token_ids.tolist()
    assert first == second == dict.fromkeys(FOLLOWED_BY_RANKS, right)
