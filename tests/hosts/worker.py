"""A rank of `make hosts`: it does what it is told, and answers."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tpsample import (
    LMHeadSampler,
    PeerLost,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
    verify,
)
from tpsample.distributed import Job, join
from tpsample.speculative.drafting import Method

V, D = 512, 16


def serve(line: Connection, timeout_s: float) -> None:
    torch.set_num_threads(1)
    with join() as job:
        worker = Worker(job, dist.new_group(timeout=timedelta(seconds=timeout_s)))
        line.send("ready")
        while True:
            name, arguments, changes = line.recv()
            line.send(getattr(worker, name)(*arguments, **changes))


class Worker:
    """A rank with a sampler per exchange; all have one head."""

    def __init__(self, job: Job, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, self._hidden = (torch.randn(rows, D, generator=generator) for rows in (V, 64))
        self._logits = reference.logits(self._hidden, weight)
        self._is_last = job.rank == job.world_size - 1
        shard = VocabShard.even(V, job.rank, job.world_size)
        own = weight[shard.start : shard.stop]
        make = partial(LMHeadSampler, own, shard=shard, group=group)
        self._sampler = cache(lambda exchange: make(exchange=exchange))

    def steps(
        self, exchange: str, rows: int, count: int, method: Method | None = None, **changes: Any
    ) -> dict[str, Any]:
        """Take steps; return the mean time of all but the first, and how many tokens are wrong.

        A rank that waits for nobody in one step does so in the next, so no step alone tells.

        Args:
            method: of verifications in place of steps. Of none of their tokens is it said.
        """
        batch, took, found = _batch(rows, **changes), [], []
        for position in range(count):
            began = time.monotonic()
            try:
                if method is not None:
                    self._verify(exchange, batch, 8 * position, method)
                    took.append(time.monotonic() - began)
                    continue
                output = self._sampler(exchange)(self._hidden[:rows], batch, position)
            except PeerLost as lost:
                after = time.monotonic() - began
                return {"lost": lost.ranks, "text": str(lost), "after": after}
            found.append(output.token_ids)
            took.append(time.monotonic() - began)
        wrong = sum(
            int((ids != reference.sample(self._logits[:rows], batch, position).token_ids).sum())
            for position, ids in enumerate(found)
        )
        return {"took": sum(took[1:]) / max(1, len(took) - 1), "wrong": wrong}

    def _verify(self, exchange: str, batch: SamplingBatch, position: int, method: Method) -> None:
        """Verify a draft of each row."""
        states = self._hidden[: batch.rows].unsqueeze(1).repeat(1, 2, 1)
        drafts = torch.zeros(batch.rows, 1, dtype=torch.int64)
        verify(self._sampler(exchange), states, drafts, batch, position, method=method)

    def differ(self, exchange: str, how: str) -> tuple[str, str]:
        """Make a call that is another one on the last rank; return the error."""
        sampler, rows = self._sampler(exchange), 8
        other = how if self._is_last else ""
        if other == "call":
            return outcome(lambda: sampler.prompt_logprobs(self._hidden[:rows], torch.arange(rows)))
        rows += other == "rows"
        slots = torch.arange(rows).roll(int(other == "slots"))
        batch: Any = _batch(rows).select(slots) if how == "slots" else _batch(rows)
        return outcome(lambda: sampler(self._hidden[:rows], batch, 0))

    def reset(self, exchange: str) -> None:
        self._sampler(exchange).reset()


def _batch(rows: int, kept_cap: int | None = None, **changes: Any) -> SamplingBatch:
    params = [SamplingParams(seed=seed, **changes) for seed in range(rows)]
    return SamplingBatch.from_params(params, vocab_size=V, kept_cap=kept_cap)
