"""Plants one fault at a time in a copy of the repository and sees that the nearest tests notice.

    python -m tests.mutants [--list] [--only NAME] [--workers N]

Prints a line per fault, and exits with 1 if one survives. The faults are chosen by hand
(`tests.faults`), because mutmut and cosmic-ray take no such list. They make generic faults by the
thousand, which on a suite this slow lasts for days.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
FORKED_PYTEST = ROOT / "tests" / "support" / "forked_pytest.py"
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.tensor"),
    *("triton.language.standard", "triton.runtime.interpreter", "numba", "scipy.stats"),
)
"""Modules that tests spend seconds on, and that no fault is in."""


def copy_tree(folder: Path) -> Path:
    """A copy in `folder` of what the tests of the table read."""
    for name in ("tpsample", "tests", "benchmarks", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


class Runner:
    """Runs tests in a copy of the repository, each time in a new process.

    Args:
        folder: where the copy is made.
        imported: modules that every test would import; none of them may belong to the copy.
    """

    def __init__(self, folder: Path, imported: Sequence[str] = IMPORTED) -> None:
        self.copy = copy_tree(folder)
        self._output = folder / "output.txt"
        command = [sys.executable, str(FORKED_PYTEST), *imported]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, bufsize=0, **pipes)

    def run(self, tests: Iterable[str], limit_s: float) -> str:
        """Return what notices a fault: a failed test, a crash, the end of a hang; "" for nothing.

        Raises:
            RuntimeError: pytest could not run the tests.
        """
        asked, answered = self._server.stdin, self._server.stdout
        assert asked is not None and answered is not None
        how = "-x", "-q", "-p", "no:cacheprovider"
        words = [str(self.copy), str(self._output), *how, *tests]
        asked.write(f"{json.dumps(words)}\n".encode())
        process = int(answered.readline())
        in_time = select.select([answered], [], [], limit_s)[0]
        if not in_time:
            os.killpg(process, signal.SIGKILL)  # its ranks too
        status = int(answered.readline())
        if not in_time:
            return f"a hang, ended after {limit_s:g} s"
        if status == pytest.ExitCode.OK:
            return ""
        output = self._output.read_text(errors="replace")
        if status > pytest.ExitCode.TESTS_FAILED:
            raise RuntimeError(f"pytest: exit status {status}\n{output}")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        return failed[1] if failed else f"a crash, exit status {status}"

    def close(self) -> None:
        """End the process from which the tests are started."""
        self._server.kill()
        self._server.communicate()


def plant_all(
    faults: Sequence[Fault], workers: int, imported: Sequence[str] = IMPORTED
) -> Iterator[tuple[Fault, str, float]]:
    """Each fault, what notices it, and the seconds that took.

    Raises:
        RuntimeError: a test fails without any fault.
    """
    idle: SimpleQueue[Runner] = SimpleQueue()

    def timed(fault: Fault) -> tuple[Fault, str, float]:
        runner, began = idle.get(), time.monotonic()
        path = runner.copy / fault.file
        text = path.read_text()
        try:
            path.write_text(text.replace(fault.old, fault.new))
            return fault, runner.run(fault.tests, limit_s=300), time.monotonic() - began
        finally:
            path.write_text(text)
            idle.put(runner)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        for _ in range(workers):
            runner = Runner(Path(tempfile.mkdtemp(dir=folder)), imported)
            stack.callback(runner.close)
            idle.put(runner)
        if failed := runner.run(tests, limit_s=3600):
            raise RuntimeError(f"without any fault, there is {failed}")
        yield from stack.enter_context(ThreadPoolExecutor(workers)).map(timed, faults)


def report(outcomes: Iterable[tuple[Fault, str, float]]) -> list[str]:
    """Print what became of each fault. Returns those that survived."""
    survived = []
    for fault, noticed, seconds in outcomes:
        became = f"noticed: {noticed}" if noticed else "SURVIVED"
        print(f"{seconds:4.0f} s  {fault.name}: {became}", flush=True)
        survived += [fault.name] * (not noticed)
    print(f"survived: {', '.join(survived) or 'none'}")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="See that the tests notice planted faults.")
    parser.add_argument("--list", action="store_true", help="name the faults and plant none")
    parser.add_argument("--only", metavar="NAME", help="faults with this in their name")
    parser.add_argument("--workers", type=int, default=1, help="faults at a time (default 1)")
    chosen = parser.parse_args()
    faults = [fault for fault in FAULTS if (chosen.only or "") in f"{fault.name} {fault.file}"]
    if chosen.list or not faults:
        print(*(f"{fault.file}: {fault.name}" for fault in faults), sep="\n")
        return int(not faults)
    return int(bool(report(plant_all(faults, chosen.workers))))


if __name__ == "__main__":
    sys.exit(main())
