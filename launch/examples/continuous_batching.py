"""Continuous batching in plain PyTorch: requests join while others run, and leave when they end.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/continuous_batching.py

Every rank runs the same loop over its own rows of the LM head. A text follows from its request:
not from who else is in the batch, when it joined, or how many ranks there are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.distributed import Job, join

V, D, MAX_ROWS, END = 1000, 64, 3, 0


@dataclass
class Request:
    """One text: the prompt, how to sample it, when it arrives and when it ends."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    max_tokens: int
    output: list[int] = field(default_factory=list)


REQUESTS = [
    (0, 9, SamplingParams(temperature=0)),
    (0, 6, SamplingParams(temperature=0.8, top_p=0.9, seed=1)),
    (2, 8, SamplingParams(temperature=1.2, repetition_penalty=1.3, seed=2)),
    (3, 4, SamplingParams(top_k=20, allowed_token_ids=range(500), seed=3)),
    (5, 7, SamplingParams(min_tokens=5, stop_token_ids=[END], seed=4)),
]


def hidden_states_of(running: list[Request], embedding: torch.Tensor) -> torch.Tensor:
    """Return [B, D]: yours is a transformer with a KV cache per request; here two tokens count."""
    last = [(each.prompt + each.output)[-2:] for each in running]
    a, b = F.embedding(torch.tensor(last), embedding).unbind(dim=1)  # raises for -1, no token
    return (a + b.roll(1, dims=1)).tanh()


def main(job: Job) -> list[list[int]]:
    """Serve all requests, and return their texts in the order of `REQUESTS`."""
    torch.manual_seed(0)  # the same weights on every rank; a real model is loaded by shards
    weight, embedding = torch.randn(V, D), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    own_rows = weight[shard.start : shard.stop].to(job.device)
    sampler = LMHeadSampler(own_rows, vocab_size=V, max_rows=MAX_ROWS)
    batch = SamplingBatch.from_params([], vocab_size=V, max_rows=MAX_ROWS, device=job.device)

    requests = [
        Request([7 + i, 30 + i], params, arrives, most)
        for i, (arrives, most, params) in enumerate(REQUESTS)
    ]
    waiting, running, step = deque(requests), list[Request](), 0
    while waiting or running:
        staying = [
            row
            for row, each in enumerate(running)
            if len(each.output) < each.max_tokens and END not in each.output
        ]
        joining: list[Request] = []
        while waiting and waiting[0].arrives <= step and len(staying) + len(joining) < MAX_ROWS:
            joining.append(waiting.popleft())
        if joining or len(staying) < len(running):
            batch.arrange(
                [*staying, *range(len(running), len(running) + len(joining))],
                [each.params for each in joining],
                prompt_token_ids=[each.prompt for each in joining],
            )
            running = [running[row] for row in staying] + joining
        if running:
            positions = torch.tensor([len(each.prompt) + len(each.output) for each in running])
            hidden_states = hidden_states_of(running, embedding).to(job.device)
            token_ids = sampler(hidden_states, batch, positions.to(job.device)).token_ids
            batch.append(token_ids)  # counted on the device, for penalties and min_tokens
            for each, token_id in zip(running, token_ids.tolist(), strict=True):
                each.output.append(token_id)
        step += 1
    sampler.close()
    return [each.output for each in requests]


if __name__ == "__main__":
    with join() as job:
        texts = main(job)
        if job.rank == 0:
            print(*texts, sep="\n")
