"""A rank of `make hosts`: it reads commands as lines of JSON, and answers with such."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpsample import LMHeadSampler, PeerLost, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import join

V, D = 512, 16


def main(timeout_s: float) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(rows, D, generator=generator) for rows in (V, 64))
    logits = reference.logits(hidden, weight)
    samplers: dict[str, LMHeadSampler] = {}
    with join() as job:
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        shard = VocabShard.even(V, job.rank, job.world_size)

        def steps(exchange: str, rows: int, count: int, **changes: Any) -> dict[str, Any]:
            if exchange not in samplers:
                own = weight[shard.start : shard.stop]
                samplers[exchange] = LMHeadSampler(own, shard=shard, exchange=exchange, group=group)
            params = [SamplingParams(seed=seed, **changes) for seed in range(rows)]
            batch = SamplingBatch.from_params(params, vocab_size=V)
            took, found = [], []
            for position in range(count):
                began = time.monotonic()
                try:
                    found.append(samplers[exchange](hidden[:rows], batch, position).token_ids)
                except PeerLost as lost:
                    after = time.monotonic() - began
                    return {"lost": lost.ranks, "text": str(lost), "after": after}
                took.append(time.monotonic() - began)
            wrong = sum(
                int((ids != reference.sample(logits[:rows], batch, position).token_ids).sum())
                for position, ids in enumerate(found)
            )
            return {"took": min(took[1:], default=0.0), "wrong": wrong}

        def reset(exchange: str) -> dict[str, Any]:
            samplers[exchange].reset()
            return {}

        print("ready", flush=True)
        for line in sys.stdin:
            name, *arguments, changes = json.loads(line)
            answer = (steps if name == "steps" else reset)(*arguments, **changes)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
