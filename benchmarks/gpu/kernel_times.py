"""Section `kernel_times` of the GPU check: where the time of each kind of call goes.

    python -m benchmarks.gpu.check --sections compile,kinds,kernel_times

A kind of call of `benchmarks.questions.kinds` has the kernels of a call as engines make it, each
with its launches and its µs. Beside them are the µs of the host, and those of a replay of the
call's graph.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.lab.harness import Run
from benchmarks.lab.problem import make_weight
from benchmarks.questions.kinds import KINDS, Calls
from tpsample.distributed import Job

HEADS = ((151936 // 8, 4096, 64), (151936, 4096, 64), (151936, 4096, 1))
"""Rows of the vocabulary, hidden size and rows of a batch: an eighth of a head, then all of it."""
_CALLS, _REPEATS = 10, 15


def kernel_times(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of each kind of call; a capture that raises ends the section."""
    run = Run(Job(device=device), repeats=2 if dry_run else _REPEATS)
    count = 1 if dry_run else _CALLS
    for vocab_size, hidden_size, rows in ((1000, 64, 2),) if dry_run else HEADS:
        calls = Calls(run, make_weight(vocab_size, hidden_size, device), rows)
        for name, kind in list(KINDS.items())[: 1 if dry_run else None]:
            step = calls.ours(kind, graph=False).step
            step()
            found: dict[str, Any] = {"host_us": host_us(step, count, device)}
            found["kernels"] = kernels(step, count, device)
            if not kind.kept_cap and kind.how != "prompt":  # which a graph cannot have
                timed = run.time({name: calls.ours(kind).step}, own=[name])
                run.require_graphs()
                found["replay_us"] = round(timed[name].median_us, 1)
            yield {f"{vocab_size}x{hidden_size}, {rows} rows, {name}": found}
        calls.sampler.close()


def host_us(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the host's time of a call, µs, the least of three rounds of calls.

    Calls that read the device, to see which rows are decided, wait for it.
    """
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            step()
        rounds.append((time.perf_counter() - start) / count * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return round(min(rounds), 1)


def kernels(step: Callable[[], object], count: int, device: torch.device) -> dict[str, list[float]]:
    """Return launches of a call and their µs, by kernel, the longest first; none on a CPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    launches, spent = Counter[str](), Counter[str]()
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.name] += 1
            spent[event.name] += event.device_time
    return {
        name: [round(launches[name] / count, 2), round(us / count, 2)]
        for name, us in spent.most_common()
    }
