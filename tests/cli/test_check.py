"""The verdict of a check: equal, a near tie, or a clear loser."""

from __future__ import annotations

import torch

from tpsample.cli.check import Verdict, compare


class TestCompare:
    """One row, scores 1.0 for token 0, a hair less for token 1, 0.5 for token 2."""

    scores = torch.tensor([[1.0, 1.0 - 1e-5, 0.5]])

    def verdict(self, emitted: int, one_rank: int, near_tie: float) -> Verdict:
        ours, alone, oracle = (torch.tensor([i]) for i in (emitted, one_rank, 0))
        return compare(ours, alone, oracle, self.scores, near_tie=near_tie)

    def test_equal(self) -> None:
        assert self.verdict(0, 0, 0.0) == Verdict(1, 0, 0)

    def test_a_near_tie_is_excused_only_where_allowed(self) -> None:
        assert self.verdict(1, 1, 4e-5) == Verdict(1, 0, 1)
        assert self.verdict(1, 1, 0.0) == Verdict(1, 1, 0)

    def test_a_clear_loser_never(self) -> None:
        assert self.verdict(2, 2, 4e-5) == Verdict(1, 1, 0)

    def test_one_rank_must_agree_even_in_a_near_tie(self) -> None:
        assert self.verdict(1, 0, 4e-5) == Verdict(1, 1, 0)
        assert self.verdict(0, 1, 4e-5) == Verdict(1, 1, 0)

    def test_verdict(self) -> None:
        assert Verdict(320, 0, 2).ok
        assert Verdict(320, 0, 0).line(2) == (
            "same tokens: 1 rank = 2 ranks = oracle (320 tokens compared, 0 differ, 0 near ties)"
        )
        for bad in (Verdict(), Verdict(320, 1, 0), Verdict(320, 0, 0, same_on_every_rank=False)):
            assert not bad.ok
            assert "same tokens" not in bad.line(2)
