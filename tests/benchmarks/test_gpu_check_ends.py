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

from benchmarks.gpu import check, sections
from benchmarks.gpu.record import ARCHIVE, Record, tell, told
from benchmarks.gpu.sections import SECTIONS, TOTAL_SECONDS
from benchmarks.lab.harness import Run, execute
from benchmarks.lab.page import PAGE
from benchmarks.lab.results import RESULT, Result
from benchmarks.questions import BENCHMARKS
from tests.support.commands import lives, wait_for
from tests.support.limits import slowness
from tests.support.tiers import long

FOUND = {"found": ["a fact"], "rows": [{"candidate": "race", "kind": "baseline"}]}
TELLS = f"""
import sys, time
from benchmarks.gpu.record import tell
print("NCCL WARN: hello")
tell({FOUND})
print("[1]")
"""
"""The start of a section in place of a real one."""


class Clock:
    """A time that goes a hundred times as fast while somebody sleeps and a file is there."""

    def __init__(self, file: Path) -> None:
        self.now, self.file = 0.0, file

    def time(self):
        return self.now

    def sleep(self, seconds):
        time.sleep(seconds)
        self.now += seconds * (100 if self.file.exists() else 1)


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Sections that run the code they are given; none of them is real. The clock is fast only
    while one `hangs`, because a busy machine takes a while to start it."""
    at_work = tmp_path / "at work"

    def command(part, *_):
        at_work.unlink(missing_ok=True)
        each = set_code.codes
        return [sys.executable, "-c", each.get(part.split(":")[0], each[None])]

    def set_code(code, name=None):
        set_code.codes[name] = code
        monkeypatch.setattr(check, "command_of", command)

    monkeypatch.setattr(check, "at_once", lambda: 1)  # they share a file and a clock
    set_code.codes, set_code.clock = {}, Clock(at_work)
    set_code.hangs = f"\nopen({str(at_work)!r}, 'w')\ntime.sleep(60)"
    set_code(TELLS)
    return set_code


def _record(output: Path, archive: Path | None = None) -> Record:
    return Record(output, archive or output / ARCHIVE, dry_run=True)


def _archived(archive: Path) -> dict:
    with tarfile.open(archive) as tar:
        return json.load(tar.extractfile("gpu_check-dry-run/check.json"))


def test_facts_are_told_beside_what_libraries_print(capsys):
    tell({"a": 1, "rows": [1]})
    print("warning\n[2]")
    tell({"rows": [2], "b": 2})
    text = capsys.readouterr().out
    assert told(text) == {"a": 1, "b": 2, "rows": [1, 2]}
    assert told(text[:-4]) == {"a": 1, "rows": [1]}  # killed within a line
    assert told("") == {}


def test_every_section_that_is_too_slow_leaves_what_it_found(pretended, tmp_path, monkeypatch):
    """Each hangs once it has found something, until the clock of the run is over."""
    monkeypatch.setattr(check, "time", pretended.clock)
    pretended(TELLS + pretended.hangs)
    names = list(SECTIONS)
    ending = check.Ending(TOTAL_SECONDS)
    assert check.run_all(names, _record(tmp_path), ending) == 1
    sections = _archived(tmp_path / ARCHIVE)["sections"]
    assert list(sections) == names
    begun = [each for each in sections.values() if each["status"] == "failed"]
    assert len(begun) > 4 and ending.left() < 5
    assert all(each["facts"] == FOUND and "not done in" in each["error"] for each in begun)
    assert {each["status"] for each in sections.values()} == {"failed", "skipped"}


def test_sections_that_time_nothing_run_side_by_side_and_the_others_alone(
    pretended, tmp_path, monkeypatch
):
    """Two end only when both have begun."""
    monkeypatch.setattr(check, "at_once", lambda: 2)
    for mine, other in (("oracle", "noise"), ("noise", "oracle")):
        begun, awaited = (str(tmp_path / name) for name in (mine, other))
        meets = f"""
import os
open({begun!r}, "w")
while not os.path.exists({awaited!r}): time.sleep(0.01)
"""
        pretended(TELLS + meets, mine)
    assert check.run_all(["oracle", "noise"], _record(tmp_path), check.Ending(60)) == 0
    assert list(_archived(tmp_path / ARCHIVE)["sections"]) == ["oracle", "noise"]
    judged = list(sections.SIDE_BY_SIDE)
    assert check.waves(list(SECTIONS))[:4] == [["environment"], ["compile"], judged, ["tune"]]
    assert all(len(wave) == 1 for wave in check.waves(list(SECTIONS))[3:])


def test_a_section_that_fails_keeps_its_facts_beside_its_error(pretended, tmp_path):
    pretended(TELLS + "raise AssertionError('a wrong id')")
    assert check.run_all(["oracle"], _record(tmp_path), check.Ending(60)) == 1
    section = _archived(tmp_path / ARCHIVE)["sections"]["oracle"]
    assert section["facts"] == FOUND and section["error"] == "AssertionError: a wrong id"
    page = (tmp_path / "gpu_check-dry-run" / PAGE).read_text()
    assert "a wrong id" in page and "a fact" in page


def test_a_page_that_cannot_be_written_costs_the_page_alone(pretended, tmp_path):
    folder = tmp_path / "noise-cpu"
    (folder / PAGE).mkdir(parents=True)
    execute(BENCHMARKS["ceilings"], Run.small(batches=(2,), repeats=1), folder / RESULT)
    pretended(TELLS + f"tell({{'folder': {folder.name!r}}})", "noise")
    assert check.run_all(["noise", "oracle"], _record(tmp_path), check.Ending(60)) == 0
    record = _archived(tmp_path / ARCHIVE)
    assert list(record["sections"]) == ["noise", "oracle"]
    assert ["IsADirectoryError" in line for line in record["problems"]] == [True]
    with tarfile.open(tmp_path / ARCHIVE) as tar:
        assert f"{folder.name}/{RESULT}" in tar.getnames()


def _started(section: str, output: Path) -> subprocess.Popen[str]:
    """A run whose section has begun; what it starts inherits a variable that names its folder."""
    words = ("--dry-run", "--sections", section, "--seconds", "300", "--output", str(output))
    # The kernel hangs up stopped processes whose parent has gone, and would end them for us.
    command = ["nohup", sys.executable, "-m", "benchmarks.gpu.check", *words]
    env = os.environ | {"STARTED_FOR": str(output)}
    run = subprocess.Popen(command, cwd=check.ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("environment")  # the next section has begun
    return run


def _at_work(output: Path, word: str = "--section") -> list[int]:
    """The living processes that a run has started, by a word of their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text().split("\0")
            is_its = f"STARTED_FOR={output}" in (process / "environ").read_text().split("\0")
            if is_its and word in words and "benchmarks.lab.orphans" not in words:
                found.append(int(process.name))
    return [process for process in found if lives(process)]


def _kept(output: Path) -> dict:
    """The sections of the record, which is in the archive, too."""
    with tarfile.open(output / ARCHIVE) as tar:
        assert "gpu_check-dry-run/check.json" in tar.getnames()
    sections = json.loads((output / "gpu_check-dry-run" / "check.json").read_text())["sections"]
    assert sections["environment"]["status"] == "passed"
    return sections


@pytest.mark.parametrize("section", ["tiles", *long(("noise",))])
def test_a_run_that_is_told_to_stop_kills_its_section_and_keeps_what_it_knew(section, tmp_path):
    run = _started(section, tmp_path)
    wait_for(lambda: len(_at_work(tmp_path)) == 1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30 * slowness()) == 128 + signal.SIGTERM
    assert not _at_work(tmp_path)
    assert "told to stop" in _kept(tmp_path)[section]["error"]


@pytest.mark.parametrize(
    ("section", "child"),
    [("filters", "--section"), *long(("processes", "--multiprocessing-fork"))],
)
def test_a_run_that_is_killed_outright_leaves_its_results_and_no_process(section, child, tmp_path):
    """Nothing can be cleaned up then: the section notices that its parent has gone."""
    run, rows = _started(section, tmp_path), list[dict]()

    def measured() -> bool:
        """It has measured something, or started its processes."""
        if section == "processes":
            return bool(_at_work(tmp_path, child))
        for path in tmp_path.glob(f"{section}-*/{RESULT}"):
            rows[:] = Result.load(path).rows
        return len(rows) > 1

    wait_for(measured)
    children = _at_work(tmp_path, child)

    def stopped() -> list[int]:
        """Stop those that live, so that none ends by itself; the kernel lets them go on."""
        living = [each for each in children if lives(each)]
        for each in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
        return living

    stopped()
    run.kill()
    run.wait()
    try:
        wait_for(lambda: not stopped(), 20)
    finally:
        for each in filter(lives, children):
            os.kill(each, signal.SIGKILL)
    assert children
    assert not _at_work(tmp_path)
    _kept(tmp_path)
    for path in tmp_path.glob(f"{section}-*/{RESULT}"):
        assert Result.load(path).rows[: len(rows)] == rows
