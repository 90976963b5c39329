"""Runs the compiled kernels on emulated GPUs.

    python -m tests.compiled [--arch 80 90] [--only PART …] [--seeds 24] [--page FOLDER]

Prints a line per part, and exits with 1 if a token is wrong or a kernel did what it may not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.machine import describe
from benchmarks.static.aot import GPUS
from tests.compiled.coverage import PACKAGE, unexplained
from tests.compiled.page import write_page
from tests.compiled.steps.parts import run_part

NORMAL = (
    *("goldens", "peers", "one_id", "one_push", "plain", "tiles", "stories", "masks", "planted"),
    *("searches", "slots", "appends", "scores", "counts", "emulator"),
)
LIMIT_S = 1800
"""A part that takes so long hangs."""


def line_of(found: dict[str, Any]) -> str:
    """Return what came of a part, for people."""
    counts = ("rows", "wrong", "near_ties")
    what = ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in counts if name in found)
    if found.get("error"):
        what += f", scores within {found['error']:.2g}, {found['of_bound']:.2f} of the bound"
    return (
        f"sm_{found['arch']} {found['part']}: {what or 'ended'}, {len(found['doubts'])} doubts, "
        f"{sum(found['launches'].values())} launches of {len(found['launches'])} kernels, "
        f"{found['processor_s']:.0f} s"
    )


def problems_of(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a part; nothing, if all is as it must be."""
    return [
        *found.get("notes", ()),
        *(f"{times} times: {text}" for text, times in found["doubts"].items()),
        *([found["fault"]] if "fault" in found else []),
    ]


def never_launched(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the kernels of the package that no part launched, by architecture."""
    return [
        f"sm_{arch}: no part launched {name}"
        for arch in dict.fromkeys(part["arch"] for part in parts)
        for name in sorted(PACKAGE.difference(*(p["launches"] for p in parts if p["arch"] == arch)))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=GPUS, default=[90, 80, 100])
    parser.add_argument("--only", metavar="PART", nargs="+", default=NORMAL)
    parser.add_argument("--seeds", type=int, default=24, help="of random steps in each part")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write a page there")
    options = parser.parse_args(arguments)
    work = [(arch, name, options.seeds) for name in options.only for arch in options.arch]
    failed, every, facts = False, list[dict[str, Any]](), describe(torch.device("cpu"))
    # Every part has a process of its own, which compiles kernels and does not interpret them.
    os.environ |= {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.compiled.steps.parts"])
    with context.Pool(options.processes, maxtasksperchild=1) as pool:
        outcomes = pool.imap(run_part, work)
        for _ in work:
            found = outcomes.next(LIMIT_S)
            every.append(found)
            print(line_of(found), flush=True)
            problems = problems_of(found)
            for problem in problems[:20]:
                print(f"  {problem}")
            failed |= bool(problems)
            if options.page:  # anew after each part, because a run may be ended
                write_page(options.page, every, facts)
    if options.only is NORMAL:
        missing = [*never_launched(every), *unexplained(every)]
        failed |= bool(missing)
        for problem in missing:
            print(problem)
    print("some parts fail" if failed else "all parts hold")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
