"""A run of gpu_check that is stopped, or whose sections print what they like, keeps its record."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_record
from benchmarks.report import RESULT
from benchmarks.results import Result
from tests.support.limits import slowness
from tests.support.tiers import long


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"a": 1}\n', {"a": 1}),
        ('{"a": 1}\nNCCL WARN: bye\n', {"a": 1}),
        ('warning\n{"a": 1}\n3\n[1]\n', {"a": 1}),
        ("nothing\n", None),
        ("", None),
    ],
)
def test_the_facts_are_the_last_object_that_is_printed(text, facts):
    assert gpu_check.last_object(text) == facts


def test_the_archive_has_the_folders_of_this_run_alone(tmp_path):
    for name in ("ours", "earlier"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(name)
    for _ in range(2):  # it is written again after every section
        gpu_record.archive(tmp_path, ["ours", None, "ours"])
    with tarfile.open(tmp_path / gpu_record.ARCHIVE) as tar:
        assert tar.getnames() == ["ours", "ours/result.json"]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(("section", "processes"), [("tiles", 2), *long(("noise", 1))])
def test_a_run_that_is_told_to_stop_kills_its_section_and_keeps_what_it_knew(
    section, processes, tmp_path
):
    words = ("--dry-run", "--sections", section, "--seconds", "200", "--output", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words]
    run = subprocess.Popen(command, cwd=gpu_check.ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("environment")  # the next section has begun
    _wait_for(lambda: len(_sections(tmp_path)) == processes)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30 * slowness()) == 128 + signal.SIGTERM
    assert not _sections(tmp_path)
    record = json.loads((tmp_path / "gpu_check-dry-run" / "check.json").read_text())
    assert record["sections"]["environment"]["status"] == "passed"
    assert "told to stop" in record["sections"][section]["error"]
    with tarfile.open(tmp_path / gpu_record.ARCHIVE) as tar:
        assert "gpu_check-dry-run/check.json" in tar.getnames()


@pytest.mark.parametrize(
    ("section", "child"),
    [("filters", "--section"), *long(("processes", "benchmarks.gpu_ranks"))],
)
def test_a_run_that_is_killed_outright_leaves_its_results_and_no_process(section, child, tmp_path):
    """Nothing can be cleaned up then: the section notices that its parent has gone."""
    words = ("--dry-run", "--sections", section, "--output", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words]
    run = subprocess.Popen(command, cwd=gpu_check.ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("environment")
    rows = list[dict]()

    def at_work() -> bool:
        """It has measured something, or started its processes."""
        if section == "processes":
            return bool(_processes(child, run.pid))
        for path in tmp_path.glob(f"{section}-*/{RESULT}"):
            rows[:] = Result.load(path).rows
        return len(rows) > 1

    _wait_for(at_work)
    children = _processes(child, run.pid)
    for each in children:
        os.kill(int(each.parent.name), signal.SIGSTOP)  # so that none ends by itself
    run.kill()
    run.wait()
    try:
        _wait_for(lambda: not any(map(_lives, children)), 20)
    finally:
        for each in filter(_lives, children):
            os.kill(int(each.parent.name), signal.SIGKILL)
    assert children
    assert not _sections(tmp_path)
    record = json.loads((tmp_path / "gpu_check-dry-run" / "check.json").read_text())
    assert record["sections"]["environment"]["status"] == "passed"
    with tarfile.open(tmp_path / gpu_record.ARCHIVE) as tar:
        assert "gpu_check-dry-run/check.json" in tar.getnames()
    for path in tmp_path.glob(f"{section}-*/{RESULT}"):
        assert Result.load(path).rows[: len(rows)] == rows


def _wait_for(holds, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds * slowness()
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(process: Path) -> bool:
    """Whether it runs: who has ended stays in the list until its parent looks."""
    with contextlib.suppress(OSError):
        return process.with_name("stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _words(process: Path) -> list[str]:
    """Its command; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return process.read_bytes().decode().split("\0")
    return []


def _processes(word: str, above: int) -> list[Path]:
    """Living processes below another, by a word of their command."""
    everything = Path("/proc").glob("[0-9]*/cmdline")
    return [
        process
        for process in everything
        if word in (words := _words(process)) and "benchmarks.orphans" not in words
        if _lives(process) and above in _above(process)
    ]


def _above(process: Path) -> list[int]:
    """The parents of a process, up to the first."""
    found, number = list[int](), int(process.parent.name)
    with contextlib.suppress(OSError):
        while number > 1:
            text = Path(f"/proc/{number}/stat").read_text()
            number = int(text.rsplit(")", 1)[1].split()[1])
            found.append(number)
    return found


def _sections(output: Path) -> list[Path]:
    """Living processes of sections that write below a folder."""
    everything = Path("/proc").glob("[0-9]*/cmdline")
    mine = {"--section", str(output)}
    return [process for process in everything if mine <= set(_words(process)) and _lives(process)]


def test_a_process_whose_parent_has_gone_does_not_begin():
    words = [sys.executable, "-m", "benchmarks.orphans", "1", sys.executable, "-c", "print(3)"]
    for parent, code, out in (("1", 1, ""), (str(os.getpid()), 0, "3\n")):
        words[3] = parent
        done = subprocess.run(words, cwd=gpu_check.ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, out)
