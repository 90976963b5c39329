"""Time limits grow where things take longer, and nothing outlives the command that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import limits
from tests.support.commands import lives, run_command, wait_for
from tests.support.ranks import RankFailed, run_ranks

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_grandchild_ends_with_a_command_that_ends(tmp_path: Path) -> None:
    # Its output goes elsewhere, because run_command waits until nobody holds the pipes.
    script = FAMILY.replace(
        '600)"]', '600)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL'
    )
    done = run_command(sys.executable, "-c", script, 0)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not lives(int(done.stdout)))


def test_a_grandchild_ends_with_a_command_at_its_limit() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_command(sys.executable, "-c", FAMILY, 600, timeout_s=3)
    wait_for(lambda: not lives(int(late.value.stdout)))


def _nap() -> str:
    time.sleep(0.5)
    return os.environ[limits._VARIABLE]


def test_a_slower_machine_gets_longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits._VARIABLE, "1")
    with pytest.raises(RankFailed, match="not done within"):
        run_ranks(1, _nap, timeout_s=1e-3)
    with pytest.raises(subprocess.TimeoutExpired):
        run_command("sleep", 0.5, timeout_s=1e-3)
    monkeypatch.setenv(limits._VARIABLE, "1e6")
    run_ranks(1, _nap, timeout_s=1e-3)
    run_command("sleep", 0.5, timeout_s=1e-3)


def test_a_session_measures_once_and_pytests_limit_follows(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import os, pytest\n"
        "@pytest.mark.timeout(7)\n"
        "def test_own(request):\n"
        "    assert request.node.get_closest_marker('timeout').args == (21.0,)\n"
        "def test_ini(request):\n"
        "    assert request.node.get_closest_marker('timeout').args == (1800.0,)\n"
    )
    words = ("-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", tmp_path, "-c")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 600\n")
    env = {limits._VARIABLE: "3"}
    done = run_command(sys.executable, *words, tmp_path / "pytest.ini", test, env=env)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
