"""One command on a machine with one GPU: is everything right, and how fast is it?

    python -m benchmarks.gpu_check              under 9 minutes; what `make gpu` runs
    python -m benchmarks.gpu_check --dry-run    tiny, on a CPU, in the Triton interpreter
    python -m benchmarks.gpu_check --sections tiles,processes      adds to the day's record
    python -m benchmarks.gpu_check --seconds 220 --output r        ends in time, all below r
    python -m benchmarks.gpu_check --sections compile,tune,shard   tunes, then measures with that

`tune` runs when it is named, because it takes minutes and writes the table that the sampler reads;
the other sections (`benchmarks.gpu_sections`) all run by default. What they launch is compiled
first, in as many processes as there are cores, so that a section that measures does not compile.

Every section is a process of its own with its own time limit, so that whatever goes wrong in one
leaves the others alone. What is known is written after each section, and everything that this run
has written goes into one archive, `gpu_check.tar.gz`, because a borrowed machine may hand back few
files. A run that is told to stop (SIGTERM, Ctrl-C) kills its section and keeps the record, with
what that section had measured. One that is killed outright keeps what was written, and its section
ends with it. Needs torch, triton, numpy and the standard library; plots also matplotlib.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_record import archive, keep
from benchmarks.gpu_sections import ON_REQUEST, SECTIONS, run_section
from benchmarks.orphans import with_parent

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 510.0
DRY_RUN_SECONDS = 480.0
TILE_PROCESSES = 6
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
    output = (options.output or default).resolve()  # sections start in another folder
    if options.section:
        # Where it hangs, should it be killed.
        faulthandler.dump_traceback_later(max(1.0, options.until - time.time() - 2))
        sys.argv[1:] = ["--dry-run"] * options.dry_run  # the command that results are to name
        facts = run_section(options.section, options.dry_run, output, options.until)
        print(json.dumps(facts))
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
    failed = run_all(names, options.dry_run, output, ending)
    return 128 + ending.signal if ending.signal else failed


def run_all(names: list[str], dry_run: bool, output: Path, ending: Ending) -> int:
    """Run every section in a process of its own, and bring the record up to date after each."""
    folder = output / ("gpu_check-dry-run" if dry_run else "gpu_check")
    done: dict[str, Any] = {}
    commit = None
    for name in names:
        seconds = min(SECTIONS[name], ending.left())
        if ending.signal:
            break
        part = f"compile:{','.join(names)}" if name == "compile" else name
        section = _section(part, dry_run, output, seconds, ending)
        if name == "environment" and section["status"] == "passed":
            commit = section["facts"]["commit"]
            folder = folder if dry_run else output / _folder_name(section["facts"])
        done[name] = section | {"commit": commit}
        print(f"{name:14} {section['status']:8} {section['seconds']:6.1f} s  {_summary(section)}")
        sys.stdout.flush()
        keep(done, dry_run, folder)
        archive(
            output, [folder.name, *(each.get("facts", {}).get("folder") for each in done.values())]
        )
    print(folder)
    return int(any(section["status"] != "passed" for section in done.values()))


def _section(
    name: str, dry_run: bool, output: Path, seconds: float, ending: Ending
) -> dict[str, Any]:
    """Run one section; its status, duration, and what it found or why it failed."""
    if seconds < 5:
        return {"status": "skipped", "seconds": 0.0, "error": "no time left"}
    if name != "tiles":
        return _in_a_process(name, dry_run, output, seconds, ending)
    # Every tile has to be compiled, and nothing is timed: several processes at once.
    count = 2 if dry_run else TILE_PROCESSES
    names = [f"tiles:{part}/{count}" for part in range(count)]
    with ThreadPoolExecutor(count) as pool:
        parts = list(
            pool.map(lambda each: _in_a_process(each, dry_run, output, seconds, ending), names)
        )
    section = {
        "status": "passed",
        "seconds": max(part["seconds"] for part in parts),
        "facts": {"tiles": [t for part in parts for t in part.get("facts", {}).get("tiles", [])]},
    }
    if failed := [part for part in parts if part["status"] != "passed"]:
        section |= {
            "status": "failed",
            "error": "; ".join(part["error"] for part in failed),
            "log": [line for part in failed for line in part["log"]],
        }
    return section


def _in_a_process(
    name: str, dry_run: bool, output: Path, seconds: float, ending: Ending
) -> dict[str, Any]:
    start = time.time()
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", "--section", name]
    command += ["--output", str(output), "--until", str(start + seconds)]
    command += ["--dry-run"] if dry_run else []
    code, stdout, stderr = wait_for(command, seconds, ending)
    section: dict[str, Any] = {"seconds": time.time() - start}
    if code == 0 and (facts := last_object(stdout)) is not None:
        return {"status": "passed", **section, "facts": facts}
    lines = stderr.strip().splitlines() or [f"exit code {code}"]
    error = lines[-1]
    if code is None:
        error = "told to stop" if ending.signal else f"not done in {seconds:.0f} s"
    log = [*stdout.splitlines(), *lines][-40:]
    section |= {"status": "failed", "error": error, "log": log}
    if facts := left_behind(name, output, start, error):
        section["facts"] = facts
    return section


def last_object(text: str) -> dict[str, Any] | None:
    """Return the last line of `text` that is a JSON object: libraries print at their end too."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


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


def left_behind(name: str, output: Path, since: float, error: str) -> dict[str, Any]:
    """What a section that failed had measured by then: its folder, with its page written."""
    from benchmarks.report import RESULT, write_report
    from benchmarks.results import Result

    facts: dict[str, Any] = {}
    for path in output.glob(f"{name}-*/*.json"):
        if path.stat().st_mtime < since:
            continue
        facts["folder"] = path.parent.name
        if path.name == RESULT:
            result = Result.load(path)
            result.notes.append(f"The section failed: {error}")
            result.save(path)
            write_report(path.parent)
            facts["rows"] = len(result.rows)
    return facts


def _folder_name(facts: dict[str, Any]) -> str:
    from benchmarks import machine

    return f"gpu_check-{machine.slug(facts)}-{facts['date']}"


def _summary(section: dict[str, Any]) -> str:
    text = section.get("error") or json.dumps(section["facts"])
    return text if len(text) <= 300 else text[:299] + "…"


if __name__ == "__main__":
    sys.exit(main())
