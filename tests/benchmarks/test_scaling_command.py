"""The command starts ranks, survives being killed, and refuses what it cannot run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import scaling as command
from benchmarks.lab.page import PAGE
from benchmarks.lab.results import RESULT, Result
from benchmarks.lab.started_ranks import StartedRanks
from benchmarks.questions.scaling import missing
from benchmarks.questions.scaling_candidates import ONE_RANK, STORED, TPSAMPLE
from tests.support import scaling
from tests.support.commands import ROOT, TORCHRUN, run_command
from tests.support.limits import slowness
from tests.support.tiers import long

TINY = ("--tiny", "--batches", "2", "--modes", "plain,top_k 50", "--oversubscribe")


def _until_a_point_is_done(words: list[str], folder: Path, end: signal.Signals) -> None:
    """Run the command until its record has a point, then send it a signal."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120 * slowness()
    try:
        while time.monotonic() < deadline and process.poll() is None:
            for path in folder.glob(f"*/{RESULT}"):
                if json.loads(path.read_text())["rows"]:
                    return
            time.sleep(0.01)
        raise AssertionError(f"no point: {process.poll()}")
    finally:
        process.send_signal(end)
        process.wait(90 * slowness())


@pytest.mark.parametrize(
    ("end", "worlds"),
    long((signal.SIGKILL, "1"), (signal.SIGKILL, "1,2"), (signal.SIGTERM, "2,1")),
)
def test_a_killed_run_goes_on_by_the_same_command(end, worlds, tmp_path):
    words = ["-m", "tpsample.cli", "bench", "scaling", *TINY, "--world-sizes", worlds]
    words += ["--repeats", "10", "--output", str(tmp_path)]
    _until_a_point_is_done([sys.executable, *words], tmp_path, end)
    (folder,) = tmp_path.iterdir()
    before = Result.load(folder / RESULT).rows[:1]
    done = run_command(sys.executable, *words)
    assert done.returncode == 0, done.stderr
    result = Result.load(folder / RESULT)
    assert not missing(result) and result.rows[:1] == before
    points = [(int(world), mode) for world in worlds.split(",") for mode in ("plain", "top_k 50")]
    assert points == list(dict.fromkeys((row["world_size"], row["mode"]) for row in result.rows))
    expected = {1: {TPSAMPLE, STORED}, 2: {TPSAMPLE, ONE_RANK, "all-gather", "all-to-all"}}
    for world in map(int, worlds.split(",")):
        families = {row["family"] for row in result.rows if row["world_size"] == world}
        assert families == expected[world], result.left_out
    killed = ["ended" not in session for session in result.sessions]
    assert len(killed) > 1 and not killed[-1]
    (command_line,) = {session["command"] for session in result.sessions}
    assert command_line.startswith("python -m tpsample.cli bench scaling --tiny")
    page = (folder / PAGE).read_text()
    assert ("| killed |" in page) == any(killed) and "Not complete" not in page


def _invoke(*words: str):
    return CliRunner().invoke(command.app, list(words))


@pytest.fixture
def no_ranks(monkeypatch):
    """Nothing is started; the record stays as it is."""
    monkeypatch.setattr(command.question, "missing", lambda _: {})


def test_two_runs_do_not_share_a_folder(tmp_path):
    def begun():
        return command._begun(tmp_path, scaling.a_run(), False)

    with begun(), pytest.raises(command.typer.BadParameter, match="at work in"), begun():
        pass
    with begun():
        pass


def test_a_folder_that_takes_no_file_is_refused(no_ranks):
    refused = _invoke("--tiny", "--world-sizes", "1", "--output", "/dev/null")
    assert refused.exit_code == 2 and "Invalid value for '--output'" in refused.output


def test_the_record_of_another_run_is_not_mixed_in(tmp_path, no_ranks):
    first = ("--tiny", "--world-sizes", "1", "--output", str(tmp_path))
    assert _invoke(*first).exit_code == 0
    other = _invoke(*first, "--repeats", "7")
    assert other.exit_code == 2 and "repeats" in other.output
    assert _invoke(*first, "--repeats", "7", "--fresh").exit_code == 0


def _one_dies(line, *_):
    time.sleep(600 * (os.environ["RANK"] == "0"))


def test_ranks_that_die_are_said_and_the_rest_is_measured(tmp_path, monkeypatch):
    def start(world_size, body, *told, **options):
        body = _one_dies if world_size == 2 else body
        return StartedRanks(world_size, body, *told, **options)

    monkeypatch.setattr(command, "StartedRanks", start)
    words = (*TINY, "--world-sizes", "2,1", "--repeats", "1", "--output", str(tmp_path))
    shown = _invoke(*words)
    assert shown.exit_code == 1 and "W = 2: a rank failed" in shown.output
    (folder,) = tmp_path.iterdir()
    assert {row["world_size"] for row in Result.load(folder / RESULT).rows} == {1}
    assert "W = 2: a rank failed" in (folder / PAGE).read_text()


@pytest.mark.long
def test_ranks_that_torchrun_started_measure_and_one_writes(tmp_path):
    options = (*TINY, "--exchanges", "auto,p2p", "--output", tmp_path)
    done = run_command(*TORCHRUN, 2, "-m", "benchmarks.scaling", *options)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob(f"*/{RESULT}")
    result = Result.load(path)
    assert not missing(result) and not result.left_out
    assert {row["world_size"] for row in result.rows} == {2}
    assert {row["candidate"] for row in result.rows if row["kind"] == "tpsample"} == {
        TPSAMPLE,
        "p2p",
    }
    assert path.with_name(PAGE).exists()
