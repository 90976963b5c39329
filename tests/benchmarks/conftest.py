"""Every page of results watches the cores twice; in tests it does not take half a second."""

import pytest

from benchmarks import quiet


@pytest.fixture(autouse=True)
def _watched_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WATCHED_S", 0.02)
