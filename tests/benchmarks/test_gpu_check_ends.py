"""A run of gpu_check that is stopped, or whose sections print what they like, keeps its record."""

import contextlib
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_record
from tests.support.limits import slowness


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


def test_a_run_that_is_told_to_stop_kills_its_section_and_keeps_what_it_knew(tmp_path):
    words = ("--dry-run", "--sections", "noise", "--seconds", "200", "--output", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words]
    run = subprocess.Popen(command, cwd=gpu_check.ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("environment")  # the next section has begun
    deadline = time.monotonic() + 60 * slowness()
    while not _sections(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    sections = _sections(tmp_path)
    assert len(sections) == 1
    run.send_signal(signal.SIGTERM)
    assert run.wait(30 * slowness()) == 128 + signal.SIGTERM
    assert not _sections(tmp_path)
    record = json.loads((tmp_path / "gpu_check-dry-run" / "check.json").read_text())
    assert record["sections"]["environment"]["status"] == "passed"
    with tarfile.open(tmp_path / gpu_record.ARCHIVE) as tar:
        assert "gpu_check-dry-run/check.json" in tar.getnames()


def _sections(output: Path) -> list[Path]:
    """Processes of sections that write below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_bytes().decode().split("\0")
            if "--section" in words and str(output) in words:
                found.append(process)
    return found
