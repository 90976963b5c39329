"""How long is the host busy with one eager step? Python and Triton's launcher, no GPU needed.

    python -m benchmarks.questions.host_overhead [--rows B] [--steps N]

Kernels are compiled for sm_90 and their launches end where the CUDA driver would be called. So a
number holds all that a launch costs but for that call, about 2 µs each. Under a CUDA graph none of
this is paid. CPU time of the thread, the least of several rounds: other processes do not count. A
step is counted, too: calls of functions of the package, and the files that they are in.

Each kind of request has a step. The rows lie on the CPU, so operators of torch do their work there
in place of launching it. Their time is part of that of `select` and of every kind but plain.
`--rows 1` leaves little of it. The `topk` of top_k 50 is most of its time over 64 rows. As nothing
writes the results, rows with top_p count as decided by their best scores, as in most steps. The
wait for that answer is left out. In fixed rounds all launches are made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime.jit import JITFunction

import tpsample
from benchmarks.lab import machine
from benchmarks.lab.absent import AbsentGpu
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from benchmarks.lab.requests import REQUESTS
from tpsample import SampleOutput, SamplingBatch
from tpsample.agreement import construction
from tpsample.backends.torch_.passes import Verdict
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import tensors
from tpsample.ranks.ranks import Ranks

ROUNDS = 7
KINDS = ("plain", "penalties and a bias", "top_k 50", "top_p 0.9", "logprobs 5")
PACKAGE = str(Path(tpsample.__file__).parent)


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


def is_walked(file: str) -> bool:
    """Return whether a file is of the package and of the host: kernels lie in folders of theirs."""
    return file.startswith(PACKAGE) and "/kernels/" not in file.removeprefix(PACKAGE)


def walk(step: Callable[[], object]) -> dict[str, int]:
    """Return how many functions of the package a call runs, in how many files, kernels aside."""
    seen: list[str] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_walked(frame.f_code.co_filename):
            seen.append(frame.f_code.co_filename)

    step()
    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {"calls": len(seen), "files": len(set(seen))}


def steps_of(rows: int) -> dict[str, Callable[[], object]]:
    """Return steps of one rank into outputs of before: by kind of request, and over slots."""
    if triton.knobs.runtime.interpret:
        raise SystemExit("host_overhead: unset TRITON_INTERPRET; it replaces what is measured")
    problem = Problem.make(make_weight(8192, 4096, torch.device("cpu")), rows)
    with patch.object(construction, "interpreted", lambda: True):  # Triton's backend on a CPU
        sampler = make_sampler(problem.weight, rows, group=Ranks(), backend="triton")
    slots = SamplingBatch.of_slots(rows, vocab_size=problem.vocab_size)
    slots.put(list(range(rows)), problem.params)
    named, held = torch.arange(rows), slots.select(torch.arange(rows))

    def step_of(name: str, **options: Any) -> Callable[..., object]:
        before = {"prompt_token_ids": [[1, 2]] * rows, "output_token_ids": [[3]] * rows}
        params = problem.filtered(**REQUESTS[name]).params
        given = {"vocab_size": problem.vocab_size, **before, **options}
        own = SamplingBatch.from_params(params, **given)
        out = SampleOutput.empty(own.seed, None)
        out.token_ids.zero_()  # no kernel writes tokens and status
        out.status.zero_()

        def step(batch: Any = own) -> object:
            return sampler(problem.hidden_states, batch, problem.positions, out=out)

        return step

    plain = step_of("plain")
    found = {"select + plain": lambda: plain(slots.select(named, out=held))}
    found |= {name: step_of(name) for name in KINDS}
    return found | {"top_p 0.9, fixed rounds": step_of("top_p 0.9", fixed_rounds=True)}


def _decided(first_kept: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a step in which every row is decided by its best scores."""

    def decided(*arguments: Any) -> Verdict:
        verdict = first_kept(*arguments)
        verdict.decided.fill_(True)
        return verdict

    return decided


@patch.object(tensors, "READ_ON", ())  # the host reads nothing of a GPU
@patch.object(TritonShardLogits, "first_kept", _decided(TritonShardLogits.first_kept))
def overheads(rows: int, times: int) -> dict[str, dict[str, float]]:
    """Return the walk of each step, and its µs without Triton and with it."""
    steps = steps_of(rows)
    with patch.object(JITFunction, "run", lambda *_, **__: None):  # nothing of Triton
        found: dict[str, dict[str, float]] = {
            name: {**walk(step), "tpsample_us": host_us(step, times)}
            for name, step in steps.items()
        }
    AbsentGpu().take()
    for name, step in steps.items():
        found[name]["tpsample_and_triton_us"] = host_us(step, times)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the overheads as JSON."""
    parser = argparse.ArgumentParser(prog="host_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a thread that waits for others would count
    found: dict[str, Any] = {"rows": options.rows, **overheads(options.rows, options.steps)}
    found["machine"] = machine.describe(torch.device("cpu"))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
