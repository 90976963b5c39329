"""A benchmark watches the cores before and after it; in tests it does so for a moment only."""

import pytest

from benchmarks.lab import quiet


@pytest.fixture(autouse=True)
def _watched_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WATCHED_S", 0.02)
