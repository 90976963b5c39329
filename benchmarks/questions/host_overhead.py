"""How long is the host busy with one eager step? Python and Triton's launcher, no GPU needed.

    python -m benchmarks.questions.host_overhead [--rows B] [--steps N]

Kernels are compiled for sm_90 and their launches end where the CUDA driver would be called, so a
number holds whatever a launch costs but for that call, about 2 µs each. Under a CUDA graph none of
this is paid. CPU time of the thread, the least of several rounds: other processes do not count.
A step is counted, too: calls of functions of the package, and the files that they are in. The time
of `select` includes torch's own work, because the rows lie on the CPU.

Between two steps an engine arranges its batch: in 256 rows on the CPU one request leaves, one comes
and all rows move, in one `SamplingBatch.arrange`; the least and the median of many. Where requests
have penalties the state of a shard, an eighth of 128256 ids, is there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import triton

import tpsample
from benchmarks.lab import machine
from benchmarks.lab.absent import AbsentGpu
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from tpsample import SampleOutput, SamplingBatch, SamplingParams, VocabShard
from tpsample.agreement import construction
from tpsample.backends.triton_ import decode, launch
from tpsample.core import tensors
from tpsample.ranks.ranks import Ranks

ROUNDS = 7
PACKAGE = str(Path(tpsample.__file__).parent)
KERNEL_FILES = (f"{PACKAGE}/kernels/", f"{PACKAGE}/native/")


class NoKernel:
    """In place of a kernel: nothing of Triton is run either."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda **arguments: None


def host_us(step: Callable[[], object], steps: int) -> float:
    """Return the CPU time of this thread per call, µs."""
    rounds = []
    step()
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(steps):
            step()
        rounds.append((time.thread_time() - start) / steps * 1e6)
    return min(rounds)


def walk(step: Callable[[], object]) -> dict[str, int]:
    """Return how many functions of the package a call runs, in how many files, kernels aside."""
    seen: list[str] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not name.startswith(KERNEL_FILES):
            seen.append(name)

    step()
    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {"calls": len(seen), "files": len(set(seen))}


def steps_of(rows: int) -> dict[str, Callable[[], object]]:
    """Return steps of one rank into an output of before: over a batch, and over slots as well."""
    if triton.knobs.runtime.interpret:
        raise SystemExit("host_overhead: unset TRITON_INTERPRET; it replaces what is measured")
    problem = Problem.make(make_weight(1024, 4096, torch.device("cpu")), rows)
    with patch.object(construction, "interpreted", lambda: True):  # Triton's backend on a CPU
        sampler = make_sampler(problem.weight, rows, group=Ranks())
    out = SampleOutput.empty(problem.batch.seed, None)
    slots = SamplingBatch.of_slots(rows, vocab_size=problem.vocab_size)
    slots.put(list(range(rows)), problem.params)
    named, held = torch.arange(rows), slots.select(torch.arange(rows))

    def step(batch: Any = problem.batch) -> object:
        return sampler(problem.hidden_states, batch, problem.positions, out=out)

    return {"step": step, "select + step": lambda: step(slots.select(named, out=held))}


@patch.object(tensors, "READ_ON", ())  # the host reads nothing of a GPU
def overheads(rows: int, times: int) -> dict[str, dict[str, float]]:
    """Return the walk of each step, and its µs without Triton and with it."""
    steps = steps_of(rows)
    with (  # this package's own Python and nothing else
        patch.object(launch, "lm_head_kernel", NoKernel()),
        patch.object(decode, "decode_kernel", NoKernel()),
    ):
        found: dict[str, dict[str, float]] = {
            name: {**walk(step), "tpsample_us": host_us(step, times)}
            for name, step in steps.items()
        }
    AbsentGpu().take()
    for name, step in steps.items():
        found[name]["tpsample_and_triton_us"] = host_us(step, times)
    return found


ARRANGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 50, "top_p": 0.9},
    "controls": {"repetition_penalty": 1.2},
    "both": {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2},
}
"""The request of all rows, by kind."""


def arranging(kind: str, times: int, rows: int = 256) -> dict[str, float]:
    """Return the µs of one arrangement: the least, and the median."""
    fields, vocab_size, pick = ARRANGED[kind], 128256, random.Random(0)
    params = [SamplingParams(seed=row, **fields) for row in range(rows)]
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size)
    batch.prepare(VocabShard.even(vocab_size, 0, 8))
    taken = []
    for _ in range(times):
        leaving, joining = pick.randrange(rows), SamplingParams(seed=pick.getrandbits(60), **fields)
        order = [row for row in range(rows + 1) if row != leaving]
        pick.shuffle(order)
        start = time.thread_time()
        batch.arrange(order, [joining])
        taken.append((time.thread_time() - start) * 1e6)
    return {"least_us": min(taken), "median_us": statistics.median(taken)}


def main(arguments: list[str] | None = None) -> int:
    """Print the overheads as JSON."""
    parser = argparse.ArgumentParser(prog="host_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"rows": options.rows, **overheads(options.rows, options.steps)}
    found["arranging 256 rows"] = {kind: arranging(kind, options.steps) for kind in ARRANGED}
    found["machine"] = machine.describe(torch.device("cpu"))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
