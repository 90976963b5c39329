"""The command line tells of a mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pytest.importorskip("tpsample.cli.model", reason="needs the extra hf")
    pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.setattr(model, "hub_fault", lambda: "no network")


COMMANDS = {
    "a model that is not there": (
        ("--model", "nobody/nothing"),
        "error: model: cannot load 'nobody/nothing': there is no such folder and no model of that "
        "name in the cache, and Hugging Face does not answer (no network)",
    ),
    "a bias without a number": (
        ("--set", 'logit_bias={"17": "x"}'),
        "error: set: logit_bias[17]: expected a number, got 'x'",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_says_it_in_one_line_and_tells_torchrun(
    name: str, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of torchrun is longer than the line, and comes after it."""
    testing = pytest.importorskip("typer.testing", reason="needs typer and rich")
    from tpsample.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "told"))
    words, message = COMMANDS[name]
    done = testing.CliRunner().invoke(app, ["generate", *words])
    assert (done.exit_code, done.stderr) == (1, f"{message}\n")
    told = ProcessFailure(0, 0, 1, str(tmp_path / "told"))
    assert f"error: {told.message}" == message and told.timestamp > 0
