"""Sections of the GPU check on ranks that share one GPU: virtual ones, then processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.numerics import MIXED
from benchmarks.lab import ranks
from benchmarks.lab.problem import Candidate, Problem, WrongToken, make_sampler, make_weight
from benchmarks.lab.started_ranks import StartedRanks
from benchmarks.lab.timing import captured, one_line
from benchmarks.lab.virtual_ranks import even_shards
from benchmarks.questions.kinds import compare
from tpsample import LMHeadSampler, VocabShard
from tpsample.ranks.ranks import Ranks
from tpsample.request.kinds import KINDS, Kind, batches_of
from tpsample.training import KeptTokens, kept_logprobs

# Several processes on one GPU are tried with these: (backend, exchange). Two NCCL ranks of one GPU
# pass for ranks of two hosts, which talk over the loopback interface.
ATTEMPTS = {
    "symmetric memory, peer": ("gloo", "peer"),
    "NCCL, collective": ("nccl", "collective"),
    "NCCL, p2p": ("nccl", "p2p"),
}
WORLD_SIZE = 2
_ATTEMPT_SECONDS = 80.0
_STEPS = 20


def virtual_ranks(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """W = 1, 2, 4, 8 in this process; on a GPU as graph replays over the wrap of the epoch."""
    vocab_size, hidden_size, rows = (1000, 64, 3) if dry_run else (128256, 4096, 64)
    replays, distinct = (3, 3) if dry_run else (2100, 16)
    problem = Problem.make(make_weight(vocab_size, hidden_size, device), rows, MIXED)
    expected, wrong = _expected(problem, distinct), []
    for world_size in (1, 2) if dry_run else (1, 2, 4, 8):
        try:
            shards = even_shards(vocab_size, world_size)
            candidate, sampler = ranks.virtual(problem, shards)
            candidate.check()
            _again(candidate, captured(candidate.step, device), expected, replays)
            sampler.check()
            yield {"world_sizes": [world_size], "replays_each": replays}
        except Exception as error:
            wrong.append(f"{world_size} virtual ranks: {one_line(error)}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def _expected(problem: Problem, count: int) -> list[Tensor]:
    """Return the ids at this position and the next ones, of one rank with the whole vocabulary."""
    single = problem.sampled_by(make_sampler(problem.weight, problem.rows, group=Ranks()))
    found = []
    for _ in range(count):
        single.check()
        found.append(single.token_ids.clone())
        problem.positions.add_(1)
    problem.positions.sub_(count)
    return found


def _again(
    candidate: Candidate, step: Callable[[], object], expected: list[Tensor], count: int
) -> None:
    """Step through the positions of `expected` again and again; raises if an id is another."""
    positions = candidate.problem.positions
    first, wrong = positions.clone(), torch.zeros((), dtype=torch.int64, device=positions.device)
    try:
        for number in range(count):
            offset = number % len(expected)
            positions.copy_(first + offset)
            step()
            wrong += (candidate.token_ids != expected[offset]).sum()
    finally:
        positions.copy_(first)
    if int(wrong):
        raise AssertionError(f"{int(wrong)} ids differ from those of one rank")


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
    deadline = time.monotonic() + _ATTEMPT_SECONDS
    found: list[dict[str, Any]] = [{} for _ in range(WORLD_SIZE)]
    became = ["not done"] * WORLD_SIZE
    with StartedRanks(WORLD_SIZE, _worker, backend, exchange, dry_run) as started:
        for rank in started.everybody:
            with suppress(TimeoutError, EOFError):
                while isinstance(said := _next(started, rank, deadline), dict):
                    found[rank] |= said
                became[rank] = said
    if became == ["worked"] * WORLD_SIZE:
        return f"worked: {json.dumps(found[0])}"
    ranks_said = (f"rank {n}: {its}, {found[n]}" for n, its in enumerate(became))
    return f"did not work in {_ATTEMPT_SECONDS:.0f} s; {'; '.join(ranks_said)}"


def _next(started: StartedRanks, rank: int, deadline: float) -> Any:
    """Return what a rank says next: facts, or how it ended."""
    (said,) = started.answers([rank], max(0.1, deadline - time.monotonic()))
    return said


def _worker(line: Connection, backend: str, exchange: str, dry_run: bool) -> None:
    """Be a rank, and say what was done, then "worked" or what went wrong."""
    device = torch.device("cpu") if dry_run else torch.device("cuda", 0)
    try:
        join_on(device, backend)
        for facts in _steps(device, exchange, dry_run):
            line.send(facts)
        line.send({"rows_scored": _trained(device)})
        dist.destroy_process_group()
        line.send("worked")
    except Exception as error:
        line.send(one_line(error))


def join_on(device: torch.device, backend: str) -> None:
    """Join a process group whose ranks share one GPU, or have none."""
    os.environ |= {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_HOSTID": f"tpsample-rank-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=_ATTEMPT_SECONDS))


def _steps(device: torch.device, exchange: str, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Take steps, each compared with those of a sampler that holds the whole vocabulary."""
    vocab_size, hidden_size, rows = (1000, 64, 3) if dry_run else (8192, 512, 8)
    weight, steps = make_weight(vocab_size, hidden_size, device), 2 if dry_run else _STEPS
    problem = Problem.make(weight, rows)
    expected = _expected(problem, steps)
    shard = VocabShard.even(vocab_size, dist.get_rank(), WORLD_SIZE)
    sampler = make_sampler(weight[shard.start : shard.stop], rows, shard=shard, exchange=exchange)
    together = problem.sampled_by(sampler)
    _again(together, together.step, expected, steps)
    sampler.check()
    yield {"steps": steps, "rows": rows}

    # The whole step from a CUDA graph, exchange and all; a dry run repeats the step.
    _again(together, captured(together.step, device), expected, steps)
    sampler.check()

    kinds = ("plain",) if dry_run else tuple(KINDS)
    _every_kind(problem, sampler, make_sampler(weight, rows, group=Ranks()), kinds)
    sampler.close()
    yield {"graph_replays": steps, "kinds": len(kinds)}


def _every_kind(
    problem: Problem, together: LMHeadSampler, single: LMHeadSampler, kinds: Sequence[Kind]
) -> None:
    """Take steps of each kind of request; raises if what comes is not what one rank says."""
    given, device = (problem.rows, problem.vocab_size), problem.weight.device
    for kind in kinds:
        for batch in batches_of([kind], *given, device, most=problem.rows):
            rows = problem.hidden_states, batch, problem.positions
            try:
                compare(together(*rows), single(*rows))
            except WrongToken as wrong:
                raise AssertionError(f"{kind}: {wrong}") from wrong


def _trained(device: torch.device) -> int:
    """Score kept sets over the shards as a trainer does, and return how many there are.

    Raises:
        AssertionError: one rank alone has other scores or gradients.
    """
    vocab_size, hidden_size, rows, size = 1000, 64, 8, 5
    weight = make_weight(vocab_size, hidden_size, device, torch.float32)
    states = Problem.make(weight, rows).hidden_states
    ids = (states @ weight.T).topk(size).indices
    offsets, no_row = torch.arange(rows + 1, device=device) * size, torch.zeros(rows, device=device)
    kept = KeptTokens(offsets, ids.flatten(), no_row.bool())
    shard = VocabShard.even(vocab_size, dist.get_rank(), WORLD_SIZE)
    mine = weight[shard.start : shard.stop]
    ways: list[tuple[Tensor, dict[str, Any]]] = [(weight, {"group": "alone"})]
    ways.append((mine, {"shard": shard}))
    found = []
    for its, where in ways:
        x, w = (each.clone().requires_grad_() for each in (states, its))
        scores = kept_logprobs(x, w, ids[:, 0], kept, 0.7, **where)
        gradients = torch.autograd.grad([each.sum() for each in scores], (x, w))
        found.append([*scores, *gradients])
    right, got = found
    right[3] = right[3][shard.start : shard.stop]
    if not all(map(torch.equal, right[:2], got[:2])):
        raise AssertionError("training: scores differ from those of one rank")
    for expected, gradient in zip(right[2:], got[2:], strict=True):
        torch.testing.assert_close(gradient, expected)
    return rows
