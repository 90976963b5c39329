"""The verdict of a check, as people read it."""

from __future__ import annotations

from tpsample.cli.check import Verdict


def test_only_equal_tokens_on_all_ranks_are_the_same() -> None:
    assert Verdict(320, 0, 2).ok
    assert Verdict(320, 0, 0).line(2) == (
        "same tokens: 1 rank = 2 ranks = oracle (320 tokens compared, 0 differ, 0 near ties)"
    )
    for bad in (Verdict(), Verdict(320, 1, 0), Verdict(320, 0, 0, same_on_every_rank=False)):
        assert not bad.ok
        assert "same tokens" not in bad.line(2)
