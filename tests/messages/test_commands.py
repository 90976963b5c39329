"""The command line tells of a mistake in one line, and commands that messages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import tpsample
from tests.support.pasted import options_of
from tpsample.core.machine import how_to_install


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


def test_commands_of_messages_are_those_of_the_project() -> None:
    """Extras, pinned packages and targets are there; nothing is installed."""
    pytest.importorskip("rich", reason="needs typer and rich")
    from tpsample.cli.doctor import PACKAGES

    sources = "".join(path.read_text() for path in Path(tpsample.__file__).parent.rglob("*.py"))
    named = re.findall(r"`(make \w+)`|(pip install [\w-]+[^{,\"\n]*)", sources)
    commands = [target or install for target, install in named]
    assert {"make bench", "pip install triton"} <= {*commands} and len(commands) >= 3
    commands += [how_to_install(extra) for extra in ("cli,hf", *PACKAGES.values())]
    for command in commands:
        options_of(command)
