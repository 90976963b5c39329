"""A benchmark watches the cores before and after it; in tests it does so for a moment only."""

import pytest

from benchmarks.lab import quiet
from tpsample.pipeline import Pipeline


@pytest.fixture(autouse=True)
def _watched_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WATCHED_S", 0.02)


@pytest.fixture
def wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampler returns a wrong id first."""
    finish = Pipeline.finish

    def planted(self, out):
        out = finish(self, out)
        out.token_ids.view(-1)[0] = (out.token_ids.view(-1)[0] + 1) % self.settings.vocab_size
        return out

    monkeypatch.setattr(Pipeline, "finish", planted)
