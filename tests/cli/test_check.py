"""The verdict of a check, as people read it."""

from __future__ import annotations

from tpsample.cli.check import verdict_sentence


def test_only_equal_tokens_on_all_ranks_are_the_same() -> None:
    assert verdict_sentence(320, 0, 2, True, 2) == (
        "same tokens: 1 rank = 2 ranks = oracle (320 tokens compared, 0 differ, 2 near ties)",
        True,
    )
    for bad in ((0, 0, 0, True), (320, 1, 0, True), (320, 0, 0, False)):
        line, ok = verdict_sentence(*bad, 2)
        assert not ok and "same tokens" not in line
