"""Section `compile` of `gpu_check`: what the sections behind it launch is compiled before.

Compiling one kernel takes one core a second or more, and a section that compiles does not measure.
So every section is rehearsed first, and what it would launch is compiled by as many processes as
there are cores, into the cache of Triton that all sections share. Each kernel is loaded too, which
shows one that needs more shared memory than there is. `torch.compile` keeps a cache
too, which the rehearsal of the baselines fills.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.pool import AsyncResult
from typing import Any

import torch

from benchmarks import rehearsal
from benchmarks.launches import Launch
from benchmarks.orphans import end_with_parent
from benchmarks.timing import one_line
from tpsample.core.interpreted import interpreted

MOST_PROCESSES = 12
_SPARE_SECONDS = 5.0


def compile_all(
    sections: list[str], device: torch.device, dry_run: bool, until: float
) -> dict[str, Any]:
    """Rehearse these sections and compile their launches; what is not done in time is named.

    A dry run rehearses in its own process and compiles nothing, because the interpreter does not.

    Raises:
        AssertionError: a kernel does not compile.
    """
    parts = [part for part in rehearsal.parts(dry_run) if part[0] in sections]
    if interpreted():
        rehearsed = [rehearsal.rehearse(part, device, dry_run)[0] for part in parts]
        return {"launches": len({each for part in rehearsed for each in part}), "compiled": 0}
    return compile_parts(parts, device, dry_run, until - _SPARE_SECONDS, processes())


def compile_parts(
    parts: Sequence[tuple[str, ...]],
    device: torch.device,
    dry_run: bool,
    until: float,
    workers: int,
) -> dict[str, Any]:
    """Rehearse parts of sections and compile what they launch, in `workers` processes.

    The pool is ended with the last answer or at `until`, whatever its processes are busy with.
    """
    start, problems, on_gpu = time.time(), [], device.type == "cuda"
    compiling: dict[Launch, AsyncResult[str | None]] = {}
    # Not a fork: this process may hold a GPU already.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _begin, (os.getpid(),)) as pool:
        rehearsing = {part: pool.apply_async(_rehearsed, (part, device, dry_run)) for part in parts}
        while rehearsing and time.time() < until:
            for part in [part for part, result in rehearsing.items() if result.ready()]:
                launches, problem = rehearsing.pop(part).get()
                problems += [f"{' '.join(part)}: {problem}"] if problem else []
                for launch in launches:
                    if launch not in compiling:
                        compiling[launch] = pool.apply_async(compiled, (launch, on_gpu))
            time.sleep(0.05)
        rehearsed = time.time() - start
        failed, late = [], 0
        for launch, result in compiling.items():
            result.wait(max(0.0, until - time.time()))
            if not result.ready():
                late += 1
            elif error := result.get():
                failed.append(f"{launch.kernel}: {error}")
    if failed:
        raise AssertionError("; ".join(failed))
    facts = {
        "launches": len(compiling),
        "compiled": len(compiling) - late,
        "rehearsed_s": rehearsed,
        "not_rehearsed": [" ".join(part) for part in rehearsing] + problems,
        "processes": workers,
    }
    return {name: value for name, value in facts.items() if value != []}


def processes() -> int:
    """Return how many processes compile at once: one per core, at most `MOST_PROCESSES`."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def compiled(launch: Launch, load: bool = False) -> str | None:
    """Compile one launch, and load it; why it cannot be, or None."""
    try:
        launch.compile(load)
    except Exception as error:
        return one_line(error)
    return None


def _begin(parent: int) -> None:
    """A process of the pool: it ends with its parent, and starts no compilers of its own."""
    end_with_parent(parent)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _rehearsed(
    part: tuple[str, ...], device: torch.device, dry_run: bool
) -> tuple[list[Launch], str | None]:
    launches, problem = rehearsal.rehearse(part, device, dry_run)
    if device.type == "cuda" and problem is None:
        torch.cuda.empty_cache()  # a dozen processes share its memory
    return launches, problem
