"""Ratios of a rollout of a toy in place of the bundled model."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lab.harness import Run
from benchmarks.questions import replay
from tests.support import toy_trunk
from tpsample.agreement import construction


def _rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(replay, "load", toy_trunk.load)
    monkeypatch.setattr(replay, "PROMPTS", replay.PROMPTS[:2])
    monkeypatch.setattr(construction, "interpreted", lambda: False)
    return [row for rows in replay.rows(Run.small()) for row in rows]


def test_replayed_ratios_are_1_and_others_are_not(monkeypatch):
    found = _rows(monkeypatch)
    facts = [row for row in found if row["of"] == "all"]
    assert len(facts) == 8
    for row in facts:
        assert (row["exactly_1_percent"] == 100) == (row["candidate"] == "replayed")
        assert (row["mean"] < 0.95) == (row["candidate"] == "all ids")
        bins = [each["percent"] for each in found if each["of"] == "bin"
                and all(each[name] == row[name] for name in ("shape", "candidate"))]  # fmt: skip
        assert sum(bins) == pytest.approx(100)


def test_ranks_that_score_otherwise_are_told(monkeypatch):
    own = replay.kept_logprobs

    def wrong(*given: Any, **how: Any) -> Any:
        scores = own(*given, **how)
        return scores if "group" in how else scores._replace(logprobs=scores.logprobs + 1e-9)

    monkeypatch.setattr(replay, "kept_logprobs", wrong)
    with pytest.raises(AssertionError, match="ranks score otherwise than one"):
        _rows(monkeypatch)
