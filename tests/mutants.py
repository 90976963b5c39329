"""Plants one fault at a time in a copy of the repository and sees that the nearest tests notice.

    python -m tests.mutants [--list] [--only NAME] [--workers N]

Prints a line per fault, and exits with 1 if one survives. The faults are chosen by hand
(`tests.faults`), because mutmut and cosmic-ray take no such list. They make generic faults by the
thousand, which on a suite this slow lasts for days.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]


def copy_tree(folder: Path) -> Path:
    """A copy in `folder` of what the tests of the table read."""
    for name in ("tpsample", "tests", "benchmarks", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(copy: Path, tests: Iterable[str], limit_s: float) -> str:
    """Return what notices a fault: a failed test, a crash, the end of a hang; "" if nothing does.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # Byte code knows its source by size and second, and a file changes more often than that.
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=env, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"a hang, ended after {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
    if process.returncode == pytest.ExitCode.OK:
        return ""
    if process.returncode > pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"pytest: exit status {process.returncode}\n{output}")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else f"a crash, exit status {process.returncode}"


def plant_all(faults: Sequence[Fault], workers: int) -> Iterator[tuple[Fault, str, float]]:
    """Each fault, what notices it, and the seconds that took.

    Raises:
        RuntimeError: a test fails without any fault.
    """
    copies: SimpleQueue[Path] = SimpleQueue()

    def timed(fault: Fault) -> tuple[Fault, str, float]:
        copy, began = copies.get(), time.monotonic()
        path = copy / fault.file
        text = path.read_text()
        try:
            path.write_text(text.replace(fault.old, fault.new))
            return fault, run_tests(copy, fault.tests, limit_s=300), time.monotonic() - began
        finally:
            path.write_text(text)
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        for _ in range(workers):
            copies.put(copy := copy_tree(Path(tempfile.mkdtemp(dir=folder))))
        if failed := run_tests(copy, tests, limit_s=3600):
            raise RuntimeError(f"without any fault, there is {failed}")
        yield from pool.map(timed, faults)


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
