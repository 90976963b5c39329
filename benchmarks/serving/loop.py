"""The serving loop: who is admitted, decoded and done, with the times of every token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.serving.candidates import Candidate
from benchmarks.serving.slots import Slots
from benchmarks.serving.trace import Request
from tpsample.distributed import Job


@dataclass
class Served:
    """One request: what it got, and when, in seconds after the start."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the token to come."""
        return len(self.request.prompt) + len(self.token_ids)

    @property
    def done(self) -> bool:
        return len(self.token_ids) >= self.request.output_tokens

    @property
    def first_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times_s[0] - self.request.arrival_s

    @property
    def per_token_s(self) -> float:
        """Mean seconds between its tokens."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


@dataclass
class Taken:
    """One step as it was taken, for a check."""

    hidden_states: Tensor
    positions: Tensor
    seeds: list[int]
    token_ids: Tensor


@dataclass
class Round:
    """All requests served once by a candidate."""

    served: list[Served]
    seconds: float
    sampling_s: float
    steps: list[Taken]

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.served)


@torch.inference_mode()
def serve(
    job: Job, slots: Slots, requests: list[Request], candidate: Candidate, keep_steps: int = 0
) -> Round:
    """Serve all requests, in order of arrival. Collective; the clock of rank 0 admits them.

    Args:
        keep_steps: how many of the first steps are kept for a check.
    """
    candidate.begin()
    waiting = [Served(request) for request in requests]
    served = list(waiting)
    active: list[tuple[int, Served]] = []
    free = list(range(slots.cache.count))
    taken: list[Taken] = []
    sampling_s, start = 0.0, time.perf_counter()
    while not all(each.done for each in served):
        now = time.perf_counter() - start
        due = sum(each.request.arrival_s <= now for each in waiting)
        admitted = _of_rank_0(job, min(due, len(free)))
        staying = [row for row, (_, each) in enumerate(active) if not each.done]
        if not staying and not admitted:
            time.sleep(5e-4)
            continue
        joining = [(free.pop(), waiting.pop(0)) for _ in range(admitted)]
        candidate.arrange(
            [*staying, *range(len(active), len(active) + admitted)],
            [each.request for _, each in joining],
        )
        rows = [active[row] for row in staying]
        hidden = [_decoded(job, slots, rows)] if rows else []
        hidden += [_prefilled(job, slots, slot, each.request) for slot, each in joining]
        active = rows + joining
        states = torch.cat(hidden)
        positions = torch.tensor([each.position for _, each in active], device=job.device)
        before = time.perf_counter()
        tokens = candidate.step(states, positions)
        token_ids = tokens.tolist()
        now = time.perf_counter()
        sampling_s += now - before
        if len(taken) < keep_steps:
            seeds = [each.request.seed for _, each in active]
            taken.append(Taken(states, positions, seeds, tokens.clone()))
        for (_, each), token_id in zip(active, token_ids, strict=True):
            each.token_ids.append(token_id)
            each.times_s.append(now - start)
        free += [slot for slot, each in active if each.done]
    return Round(served, time.perf_counter() - start, sampling_s, taken)


def _of_rank_0(job: Job, number: int) -> int:
    if job.world_size == 1:
        return number
    told = torch.tensor([number], device=job.device)
    dist.broadcast(told, 0)
    return int(told)


def _decoded(job: Job, slots: Slots, rows: list[tuple[int, Served]]) -> Tensor:
    """Hidden states [n, D] after the last token of every row."""
    where = torch.tensor([slot for slot, _ in rows], device=job.device)
    last = torch.tensor([[each.token_ids[-1]] for _, each in rows], device=job.device)
    positions = torch.tensor([[each.position - 1] for _, each in rows], device=job.device)
    return slots.hidden_states(where, last, positions)


def _prefilled(job: Job, slots: Slots, slot: int, request: Request) -> Tensor:
    """Hidden states [1, D] after a prompt."""
    ids = torch.tensor([request.prompt], device=job.device)
    positions = torch.arange(len(request.prompt), device=job.device)[None]
    return slots.hidden_states(torch.tensor([slot], device=job.device), ids, positions)
