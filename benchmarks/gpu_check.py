"""One command on a machine with one GPU: is everything right, and how fast is it?

    python -m benchmarks.gpu_check              under 9 minutes; what `make gpu` runs
    python -m benchmarks.gpu_check --dry-run    tiny, on a CPU, in the Triton interpreter

Every section is a process of its own with its own time limit, so that whatever goes wrong in one
leaves the others alone. What is known is written after each section. Needs torch, triton, numpy
and the standard library; plots also matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 510.0
DRY_RUN_SECONDS = 300.0

# Section: seconds it may take. In order of importance within what is left of the total.
SECTIONS = {
    "environment": 40,
    "noise": 60,
    "goldens": 50,
    "oracle": 60,
    "invariance": 90,
    "virtual_ranks": 90,
    "processes": 90,
    "single_gpu": 150,
    "shard": 90,
    "epilogue": 45,
    "exchange": 45,
}
BENCHMARKS = ("single_gpu", "shard", "epilogue", "exchange")
_SPARE_SECONDS = 15.0
"""A benchmark stops this long before its section is killed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--sections", help="comma-separated; default all")
    parser.add_argument("--output", type=Path, help="folder of result folders")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    output = options.output or (
        Path(tempfile.gettempdir()) / "tpsample-benchmarks"
        if options.dry_run
        else ROOT / "benchmarks" / "results"
    )
    if options.section:
        sys.argv[1:] = ["--dry-run"] * options.dry_run  # the command that results are to name
        facts = run_section(options.section, options.dry_run, output, options.seconds)
        print(json.dumps(facts))
        return 0
    names = options.sections.split(",") if options.sections else list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--sections: expected any of {', '.join(SECTIONS)}, got {unknown}")
    return run_all(names, options.dry_run, output)


def run_section(name: str, dry_run: bool, output: Path, seconds: float) -> dict[str, Any]:
    """What section `name` found; raises if something is wrong."""
    from benchmarks import gpu_numerics, gpu_ranks, machine

    if name in BENCHMARKS:
        return _benchmark(name, dry_run, output, seconds)
    device = gpu_numerics.device_of(dry_run)
    if name == "environment":
        return machine.describe(device)
    sections = (
        gpu_numerics.noise,
        gpu_numerics.goldens,
        gpu_numerics.oracle,
        gpu_numerics.invariance,
        gpu_ranks.virtual_ranks,
        gpu_ranks.processes,
    )
    return {section.__name__: section for section in sections}[name](device, dry_run)


def _benchmark(name: str, dry_run: bool, output: Path, seconds: float) -> dict[str, Any]:
    from benchmarks import gpu_numerics, machine
    from benchmarks.harness import Run, execute
    from benchmarks.report import RESULT, write_report
    from benchmarks.shapes import SHAPES
    from tpsample.distributed import Job

    job = Job(device=gpu_numerics.device_of(dry_run))
    if dry_run:
        run = Run.small(job, batches=(2,), repeats=2)
    elif name == "single_gpu":
        run = Run(job, shapes=SHAPES[:2], batches=(1, 16, 64, 128, 256), repeats=30)
    elif name == "shard":
        run = Run(job, shapes=SHAPES[:2], batches=(1, 16, 64, 256), repeats=30)
    else:
        run = Run(job, shapes=SHAPES[:2], batches=(1, 64, 256), repeats=30)
    record = machine.describe(job.device)
    folder = output / f"{name}-{machine.slug(record)}-{record['date']}"
    try:
        result = execute(name, run, folder / RESULT, seconds=max(1.0, seconds - _SPARE_SECONDS))
    finally:
        if (folder / RESULT).exists():
            write_report(folder)
    return {"rows": len(result.rows), "folder": folder.name, **result.checks}


def run_all(names: list[str], dry_run: bool, output: Path) -> int:
    """Every section in a process of its own; the record is rewritten after each."""
    start = time.monotonic()
    total = DRY_RUN_SECONDS if dry_run else TOTAL_SECONDS
    record: dict[str, Any] = {"dry_run": dry_run, "sections": {}}
    folder = output / ("gpu_check-dry-run" if dry_run else "gpu_check")
    for name in names:
        left = total - (time.monotonic() - start)
        seconds = min(SECTIONS[name], left)
        section = _in_a_process(name, dry_run, output, seconds)
        if name == "environment" and section["status"] == "passed" and not dry_run:
            folder = output / _folder_name(section["facts"])
        record["sections"][name] = section
        print(f"{name:14} {section['status']:8} {section['seconds']:6.1f} s  {_summary(section)}")
        sys.stdout.flush()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "check.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "README.md").write_text(_page(record))
    print(folder)
    return int(any(section["status"] != "passed" for section in record["sections"].values()))


def _in_a_process(name: str, dry_run: bool, output: Path, seconds: float) -> dict[str, Any]:
    """Run one section; its status, duration, and what it found or why it failed."""
    start = time.monotonic()
    if seconds < 5:
        return {"status": "skipped", "seconds": 0.0, "error": "no time left"}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--section", name]
    command += ["--output", str(output), "--seconds", str(seconds)]
    command += ["--dry-run"] if dry_run else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "seconds": seconds, "error": f"not done in {seconds:.0f} s"}
    section: dict[str, Any] = {"seconds": time.monotonic() - start}
    if done.returncode == 0:
        return {"status": "passed", **section, "facts": json.loads(done.stdout.splitlines()[-1])}
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"status": "failed", **section, "error": lines[-1], "log": lines[-40:]}


def _folder_name(facts: dict[str, Any]) -> str:
    from benchmarks import machine

    return f"gpu_check-{machine.slug(facts)}-{facts['date']}"


def _summary(section: dict[str, Any]) -> str:
    text = section.get("error") or json.dumps(section["facts"])
    return text if len(text) <= 300 else text[:299] + "…"


def _page(record: dict[str, Any]) -> str:
    lines = ["# gpu_check", ""]
    if record["dry_run"]:
        lines += ["**Dry run: tiny sizes on a CPU, the kernels in the Triton interpreter.**", ""]
    lines += ["| section | status | seconds |", "| --- | --- | ---: |"]
    for name, section in record["sections"].items():
        lines.append(f"| {name} | {section['status']} | {section['seconds']:.0f} |")
    for name, section in record["sections"].items():
        facts = section.get("facts") or {"error": section["error"]}
        lines += ["", f"## {name}", "", "| what | value |", "| --- | --- |"]
        for key, value in facts.items():
            text = str(value).replace("\n", "<br>").replace("|", "\\|")
            lines.append(f"| {key} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
