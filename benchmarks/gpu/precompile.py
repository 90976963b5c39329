"""Kernels of a section of the GPU check are compiled ahead of it, in many processes.

Compiling one kernel takes one core a second or more, and a section that compiles does not measure.
So every section is rehearsed: its own code runs without any kernel, and its launches are put on a
list. Nothing is judged, because a rehearsal computes nonsense. The listed kernels are compiled by
as many processes as there are cores, into the cache of Triton that all sections share. They are
loaded, too, which shows a kernel that needs more shared memory than there is. `torch.compile` keeps
a cache too, which the rehearsal of the baselines fills.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.pool import AsyncResult
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.lab import reads
from benchmarks.lab.harness import Run
from benchmarks.lab.launches import Launch, filled, listed, searched
from benchmarks.lab.orphans import end_with_parent
from benchmarks.lab.problem import Candidate, Compared, Problem
from benchmarks.lab.timing import Timing, one_line

Step = Callable[[], object]
Rehearsal = Callable[[torch.device], object]
"""A section, or a point of one; it can be sent to another process."""


def rehearse(part: Rehearsal, device: torch.device) -> tuple[list[Launch], str | None]:
    """Return the launches of a part, each once, and what ended its rehearsal early."""
    problem = None
    with listed() as launches, searched(), _nothing_is_judged():
        try:
            part(device)
        except AssertionError:
            pass  # a section that tries all and then says that something is wrong
        except Exception as error:
            problem = one_line(error)
    if device.type == "cuda" and problem is None:
        torch.cuda.empty_cache()  # a dozen processes share its memory
    return list(launches), problem


def compile_parts(
    parts: Mapping[str, Rehearsal], device: torch.device, until: float, workers: int
) -> dict[str, Any]:
    """Rehearse parts of sections and compile what they launch, in `workers` processes.

    The pool is ended with the last answer or at `until`, whatever its processes are busy with.

    Raises:
        AssertionError: a kernel does not compile.
    """
    start, problems, on_gpu = time.time(), [], device.type == "cuda"
    compiling: dict[Launch, AsyncResult[str | None]] = {}
    # Not a fork: this process may hold a GPU already.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _begin, (os.getpid(),)) as pool:
        rehearsing = {
            name: pool.apply_async(rehearse, (part, device)) for name, part in parts.items()
        }
        while rehearsing and time.time() < until:
            for name in [name for name, result in rehearsing.items() if result.ready()]:
                launches, problem = rehearsing.pop(name).get()
                problems += [f"{name}: {problem}"] if problem else []
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
        "not_rehearsed": [*rehearsing, *problems],
        "processes": workers,
    }
    return {name: value for name, value in facts.items() if value != []}


def compiled(launch: Launch, load: bool = False) -> str | None:
    """Compile one launch, and load it; return why it cannot be, or None."""
    try:
        launch.compile(load)
    except Exception as error:
        return one_line(error)
    return None


def _begin(parent: int) -> None:
    """Let a process of the pool end with its parent, and start no compilers of its own."""
    end_with_parent(parent)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


@contextlib.contextmanager
def _nothing_is_judged() -> Iterator[None]:
    """Steps are called once, and whatever they return is right."""

    def check(self: Problem, *_: Any, **__: Any) -> Compared:
        return Compared()

    def time(self: Run, steps: Mapping[str, Step], *_: Any, **__: Any) -> dict[str, Timing]:
        for name, step in steps.items():
            try:
                step()
            except Exception as error:
                self.note(f"{name}: {one_line(error)}")
        return {name: Timing((1.0,), True) for name in steps}

    def time_checked(
        self: Run, candidates: dict[str, Candidate], others: Mapping[str, Step], *_: Any, **__: Any
    ) -> dict[str, Timing]:
        with filled():
            times = self.time({name: each.step for name, each in candidates.items()})
        return {**times, **self.time(others)}

    def check_read(name: str, read: Step, words: Tensor) -> None:
        read()

    with (
        patch.object(Problem, "check", check),
        patch.object(Run, "time", time),
        patch.object(Run, "time_checked", time_checked),
        patch.object(reads, "check_read", check_read),
    ):
        yield
