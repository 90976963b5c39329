"""Continuous batching in plain PyTorch: prompts read in chunks, requests that make room and return.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/continuous_batching.py

A request keeps its slot while it runs, and each step names the slots of its rows. A text follows
from its request: not from chunks, preemption, who else runs, or how many ranks there are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.distributed import Job, join

V, D, END = 1000, 64, 0
SLOTS, BUDGET = 3, 6  # requests that run at once, and tokens that the trunk reads in a step
PREEMPTED = {4: 2, 7: 1, 9: 3}  # by step, the request that has to make room if it runs


@dataclass(eq=False)
class Request:
    """One text; the cache of its slot has `read` of its tokens."""

    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    read: int = 0
    slot: int = -1


REQUESTS = [
    (9, SamplingParams(temperature=0)),
    (6, SamplingParams(temperature=0.8, top_p=0.9, seed=1)),
    (8, SamplingParams(temperature=1.2, repetition_penalty=1.3, seed=2)),
    (4, SamplingParams(top_k=20, allowed_token_ids=range(500), seed=3)),
    (7, SamplingParams(min_tokens=5, stop_token_ids=[END], seed=4)),
]


def main(job: Job) -> list[list[int]]:
    """Return the texts of all requests. The embeddings of four tokens stand for a transformer."""
    torch.manual_seed(0)  # the same weights on every rank; a real model is loaded by shards
    weight, embedding = torch.randn(V, D).to(job.device), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V, max_rows=SLOTS)
    batch = SamplingBatch.of_slots(SLOTS, vocab_size=V, device=job.device)
    requests = [Request([*range(7 + i, 12 + 3 * i)], *its) for i, its in enumerate(REQUESTS)]
    waiting, running, free, step = deque(requests), list[Request](), [*range(SLOTS)], 0

    def leave(request: Request) -> None:
        running.remove(request)
        batch.free(request.slot)
        free.append(request.slot)

    while waiting or running:
        if step in PREEMPTED and (request := requests[PREEMPTED[step]]) in running:
            leave(request)
            request.read = 0  # its cache is gone, its output is not
            waiting.append(request)
        while waiting and free:
            request = waiting.popleft()
            request.slot = free.pop()
            so_far = {"prompt_token_ids": [request.prompt], "output_token_ids": [request.output]}
            batch.put(request.slot, request.params, **so_far)
            running.append(request)
        budget, rows = BUDGET, list[Request]()
        for request in running:
            unread = len(request.prompt + request.output) - request.read
            chunk = min(unread, budget)
            request.read, budget = request.read + chunk, budget - chunk
            if 0 < unread == chunk:  # a prompt that goes on draws nothing
                rows.append(request)
        if rows:
            texts, slots = [r.prompt + r.output for r in rows], [r.slot for r in rows]
            chosen = batch.select(torch.tensor(slots, device=job.device), host=slots)
            states = torch.stack([embedding[text[-4:]].cumsum(0)[-1].tanh() for text in texts])
            positions = torch.tensor([len(text) for text in texts], device=job.device)
            out = sampler(states.to(job.device), chosen, positions)
            chosen.append(out)  # counted on the device, for penalties and min_tokens
            for request, token_id in zip(rows, out.token_ids.tolist(), strict=True):
                request.output.append(token_id)
                if token_id == END or len(request.output) == request.max_tokens:
                    leave(request)
        step += 1
    sampler.close()
    return [request.output for request in requests]


if __name__ == "__main__":
    with join() as job:
        texts = main(job)
        if job.rank == 0:
            print(*texts, sep="\n")
