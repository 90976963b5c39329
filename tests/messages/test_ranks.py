"""All ranks are told the same of a mistake that one of them made, and go on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.mistakes import HIDDEN, batch_of, half, said
from tests.support.ranks import run_ranks
from tests.support.wrong_ranks import TOGETHER
from tpsample import LMHeadSampler


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
