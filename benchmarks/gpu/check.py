"""One command on a machine with one GPU: is everything right, and how fast is it?

    python -m benchmarks.gpu.check              under 9 minutes; what `make gpu` runs
    python -m benchmarks.gpu.check --dry-run    tiny, on a CPU, in the Triton interpreter
    python -m benchmarks.gpu.check --sections compile,tiles        adds to the day's record
    python -m benchmarks.gpu.check --seconds 220 --output r        ends in time, all below r
    python -m benchmarks.gpu.check --archive r.tgz --output r      all of r in one file

Every section (`benchmarks.gpu.sections`) is a process of its own with its own time limit, so that
whatever goes wrong in one leaves the others alone. Sections that time nothing run side by side. The
record is written after each section. Everything that this run has written goes into one archive,
because a borrowed machine may hand back few files. A run that is told to stop (SIGTERM, Ctrl-C)
kills its sections and keeps the record, with the facts that they had found. One that is killed
outright keeps what was written, and its sections end with it. A file that cannot be written stops
nothing. Needs torch, triton, numpy and the standard library; plots also matplotlib.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import ARCHIVE, Record, tell, told
from benchmarks.gpu.sections import (
    ON_REQUEST,
    SECTIONS,
    SIDE_BY_SIDE,
    TOTAL_SECONDS,
    run_section,
)
from benchmarks.lab.orphans import with_parent

ROOT = Path(__file__).resolve().parents[2]
DRY_RUN_SECONDS = 480.0
POLL_SECONDS = 0.05


class Ending:
    """When a run has to end: as planned, or at once when it is told to stop."""

    def __init__(self, seconds: float) -> None:
        self.at = time.time() + seconds
        self.signal = 0

    def now(self, number: int, frame: object) -> None:
        """End now, as a signal handler. It raises nothing: a section's process may just be made."""
        self.at, self.signal = 0.0, number

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.at - time.time()


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--sections", help="comma-separated, environment always; default all")
    parser.add_argument("--output", type=Path, help="folder of result folders")
    parser.add_argument("--archive", type=Path, help=f"default {ARCHIVE} in the output folder")
    parser.add_argument("--seconds", type=float, help="for all sections together")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=time.time() + 600, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    default = ROOT / "benchmarks" / "results"
    if options.dry_run:
        default = Path(tempfile.gettempdir()) / "tpsample-benchmarks"
    output = options.output or default
    if options.section:
        # Where it hangs, should it be killed.
        faulthandler.dump_traceback_later(max(1.0, options.until - time.time() - 2))
        sys.argv[1:] = ["--dry-run"] * options.dry_run  # the command that results are to name
        for facts in run_section(options.section, options.dry_run, output, options.until):
            tell(facts)
        return 0
    chosen = set(SECTIONS) - set(ON_REQUEST)
    if options.sections:
        chosen = set(options.sections.split(","))
    if unknown := chosen - set(SECTIONS):
        parser.error(f"--sections: expected any of {', '.join(SECTIONS)}, got {unknown}")
    names = [name for name in SECTIONS if name in chosen | {"environment"}]
    total = options.seconds or (DRY_RUN_SECONDS if options.dry_run else TOTAL_SECONDS)
    ending = Ending(total)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending.now)
    output = writable(output.resolve())  # sections start in another folder
    archive = (options.archive or output / ARCHIVE).resolve()
    failed = run_all(names, Record(output, archive, options.dry_run), ending)
    return 128 + ending.signal if ending.signal else failed


def writable(folder: Path) -> Path:
    """Return the folder, or another one where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="gpu_check-"))
        print(f"{folder} cannot be written, so results go to {other}: {error}", flush=True)
        return other
    return folder


def run_all(names: list[str], record: Record, ending: Ending) -> int:
    """Run every section in a process of its own, and bring the record up to date after each."""
    record.folder = "gpu_check-dry-run" if record.dry_run else "gpu_check"
    commit = None
    for wave in waves(names):
        if ending.signal:
            break
        for name, section in _ended(wave, names, record, ending):
            if name == "environment" and section["status"] == "passed":
                commit = section["facts"]["commit"]
                if not record.dry_run:
                    from benchmarks.lab.machine import folder_name  # imports torch

                    record.folder = folder_name("gpu_check", section["facts"])
            found = record.sections | {name: section | {"commit": commit}}
            record.sections = {each: found[each] for each in names if each in found}
            print(f"{name:14} {section['status']:8} {section['seconds']:6.1f} s  ", end="")
            print(_summary(section), flush=True)
            record.keep()
    for goal in record.goals:
        print(f"{goal['goal']}, at most {goal['target']}: {goal['found']}")
    print(record.output / record.folder)
    print(record.archive)
    return int(any(section["status"] != "passed" for section in record.sections.values()))


def waves(names: list[str]) -> list[list[str]]:
    """Return the sections in their order, those that run side by side in one list."""
    runs = itertools.groupby(names, lambda name: name in SIDE_BY_SIDE)
    return [wave for side, run in runs for wave in ([list(run)] if side else [[n] for n in run])]


def at_once() -> int:
    """Return how many sections run at once: each compiles, and starts processes of its own."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _ended(
    wave: list[str], names: list[str], record: Record, ending: Ending
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the sections of a wave, and yield each as it ends."""

    def ran(name: str) -> tuple[str, dict[str, Any]]:
        part = f"compile:{','.join(names)}" if name == "compile" else name
        return name, _section(part, record, min(SECTIONS[name].limit_s, ending.left()), ending)

    with ThreadPoolExecutor(at_once()) as pool:
        for done in as_completed([pool.submit(ran, name) for name in wave]):
            yield done.result()


def _section(name: str, record: Record, seconds: float, ending: Ending) -> dict[str, Any]:
    """Run one section; its status, duration, and what it found or why it failed."""
    if seconds < 5:
        return {"status": "skipped", "seconds": 0.0, "error": "no time left"}
    start = time.time()
    code, stdout, stderr = wait_for(command_of(name, record, start + seconds), seconds, ending)
    section: dict[str, Any] = {
        "status": "passed" if code == 0 else "failed",
        "seconds": time.time() - start,
        "facts": told(stdout),
    }
    if code != 0:
        lines = stderr.strip().splitlines() or [f"exit code {code}"]
        error = lines[-1]
        if code is None:
            error = "told to stop" if ending.signal else f"not done in {seconds:.0f} s"
        log = [line.replace(f"{ROOT}/", "") for line in (*stdout.splitlines(), *lines)]
        section |= {"error": error, "log": log[-40:]}
    if "folder" in section["facts"]:
        with record.survives(f"The page of {name} was not written"):
            write_page(record.output / section["facts"]["folder"], section.get("error"))
    return section


def command_of(name: str, record: Record, until: float) -> list[str]:
    """Return what runs one section by itself."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu.check", "--section", name]
    command += ["--output", str(record.output), "--until", str(until)]
    return command + ["--dry-run"] * record.dry_run


def wait_for(command: list[str], seconds: float, ending: Ending) -> tuple[int | None, str, str]:
    """Run a command until it ends, its seconds are over or the run has to end.

    Returns:
        Exit code, None if it had to be killed, stdout and stderr. Nothing it started lives on.
    """
    until = time.time() + seconds
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            with_parent(command), cwd=ROOT, stdout=out, stderr=err, start_new_session=True
        )
        while (code := process.poll()) is None and time.time() < min(until, ending.at):
            time.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def write_page(folder: Path, error: str | None) -> None:
    """Write the page of a benchmark's result, with what ended its section early."""
    from benchmarks.lab import page
    from benchmarks.lab.results import RESULT, Result

    path = folder / RESULT
    if not path.exists():
        return
    if error is not None:
        result = Result.load(path)
        result.warnings.append(f"The section failed: {error}")
        result.save(path)
    page.write_page(folder)


def _summary(section: dict[str, Any]) -> str:
    facts = {k: v for k, v in section.get("facts", {}).items() if k != "rows"}
    text = section.get("error") or json.dumps(facts)
    return text if len(text) <= 300 else text[:299] + "…"


if __name__ == "__main__":
    sys.exit(main())
