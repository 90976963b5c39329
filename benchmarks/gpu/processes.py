"""Sections of the GPU check on ranks that share one GPU: virtual ones, then processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lab import ranks
from benchmarks.lab.orphans import with_parent
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from benchmarks.lab.timing import captured, one_line
from tpsample import VocabShard
from tpsample.ranks.ranks import Ranks

# Several processes on one GPU are tried with these: (backend, exchange). Two NCCL ranks of one GPU
# pass for ranks of two hosts, which talk over the loopback interface.
ATTEMPTS = {
    "symmetric memory, peer": ("gloo", "peer"),
    "NCCL, collective": ("nccl", "collective"),
    "NCCL, p2p": ("nccl", "p2p"),
}
WORLD_SIZE = 2
_ATTEMPT_SECONDS = 45.0
_STEPS = 20


def virtual_ranks(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """W = 1, 2, 4, 8 in this process; on a GPU as graph replays over the wrap of the epoch."""
    vocab_size, hidden_size, rows = (1000, 64, 3) if dry_run else (128256, 4096, 64)
    replays, distinct = (3, 3) if dry_run else (2100, 16)
    weight = make_weight(vocab_size, hidden_size, device)
    problem = Problem.make(weight, rows, (0.0, 0.5, 1.0, 2.0))
    single = problem.sampled_by(make_sampler(weight, rows))
    first = problem.positions.clone()
    expected = []
    for offset in range(distinct):
        problem.positions.copy_(first + offset)
        single.check()
        expected.append(single.token_ids.clone())

    wrong = []
    for world_size in (1, 2) if dry_run else (1, 2, 4, 8):
        problem.positions.copy_(first)
        try:
            _replay(problem, expected, world_size, replays)
            yield {"world_sizes": [world_size], "replays_each": replays}
        except Exception as error:
            wrong.append(f"{world_size} virtual ranks: {one_line(error)}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def _replay(problem: Problem, expected: list[Tensor], world_size: int, replays: int) -> None:
    """Step the positions through `expected` again and again; raises if an id is another."""
    if world_size == 1:
        sampler = make_sampler(problem.weight, problem.rows)
        candidate = problem.sampled_by(sampler)
    else:
        candidate, sampler = ranks.virtual(problem, world_size)
    candidate.check()
    step = captured(candidate.step, problem.weight.device)
    first = problem.positions.clone()
    wrong = torch.zeros((), dtype=torch.int64, device=first.device)
    for replay in range(replays):
        offset = replay % len(expected)
        problem.positions.copy_(first + offset)
        step()
        wrong += (candidate.token_ids != expected[offset]).sum()
    sampler.check()
    if int(wrong):
        raise AssertionError(f"{int(wrong)} ids are wrong")


def processes(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Several processes on one GPU, each way tried: "worked", or why it did not.

    All start together, since each is mostly waiting for imports. Nothing fails here, because none
    of this is a supported way to run. No step is timed: processes of one GPU take turns of a
    millisecond, which would hide an exchange of microseconds. That needs a GPU per rank.
    """
    attempts = {"gloo, collective": ("gloo", "collective")} if dry_run else ATTEMPTS
    with ThreadPoolExecutor(len(attempts)) as pool:
        answers = {pool.submit(_attempt, *pair, dry_run): n for n, pair in attempts.items()}
        for answer in as_completed(answers):
            yield {answers[answer]: answer.result()}


def _attempt(backend: str, exchange: str, dry_run: bool) -> str:
    """Start the ranks, wait, and say what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        workers, logs = [], [Path(folder) / f"rank-{rank}.log" for rank in range(WORLD_SIZE)]
        for rank, log in enumerate(logs):
            variables = os.environ | {
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
                "NCCL_HOSTID": f"tpsample-rank-{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, "-m", "benchmarks.gpu.processes", backend, exchange]
            command += [str(rank), f"{folder}/store", *["--dry-run"] * dry_run]
            with log.open("w") as out:
                process = subprocess.Popen(
                    with_parent(command), env=variables, stdout=out, stderr=out
                )
            workers.append(process)
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        try:
            codes = [worker.wait(max(0.1, deadline - time.monotonic())) for worker in workers]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        last = [(log.read_text().strip().splitlines() or ["no output"])[-1] for log in logs]
    if codes == [0] * WORLD_SIZE:
        return f"worked: {last[0]}"
    ended = f"exit codes {codes}" if codes else f"not done in {_ATTEMPT_SECONDS:.0f} s"
    ranks_said = "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(last))
    return f"did not work: {ended}; {ranks_said}"


def _worker(backend: str, exchange: str, rank: int, store: str, dry_run: bool) -> dict[str, Any]:
    """One rank: some steps, each compared with a sampler that holds the whole vocabulary."""
    device = torch.device("cpu") if dry_run else torch.device("cuda", 0)
    if not dry_run:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=_ATTEMPT_SECONDS),
    )
    vocab_size, hidden_size, rows = (1000, 64, 3) if dry_run else (8192, 512, 8)
    weight = make_weight(vocab_size, hidden_size, device)
    problem = Problem.make(weight, rows)
    shard = VocabShard.even(vocab_size, rank, WORLD_SIZE)
    sampler = make_sampler(weight[shard.start : shard.stop], rows, shard=shard, exchange=exchange)
    alone = problem.sampled_by(make_sampler(weight, rows, group=Ranks()))
    together = problem.sampled_by(sampler)
    steps = 2 if dry_run else _STEPS
    for _ in range(steps):
        problem.positions.add_(1)
        alone.step()
        together.check()
        if not torch.equal(alone.token_ids, together.token_ids):
            raise AssertionError("ids differ from those of one rank")
    sampler.check()
    facts = {"steps": steps, "rows": rows}
    print(json.dumps({**facts, "graph_replays": "not done"}), flush=True)

    # The whole step from a CUDA graph, exchange and all; a dry run repeats the step.
    replay = captured(together.step, device)
    for _ in range(steps):
        problem.positions.add_(1)
        alone.step()
        replay()
        if not torch.equal(alone.token_ids, together.token_ids):
            raise AssertionError("ids of a replayed step differ from those of one rank")
    sampler.check()
    sampler.close()
    dist.destroy_process_group()
    return {**facts, "graph_replays": steps}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("exchange")
    parser.add_argument("rank", type=int)
    parser.add_argument("store")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    print(json.dumps(_worker(**vars(options))))
