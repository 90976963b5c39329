"""Records the likeliest tokens and the entropy of every step, without gathering logits.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/topk_trace.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, TopKTrace, VocabShard
from tpsample.distributed import Job, join

V, D, ROWS, STEPS, TOP = 1000, 64, 2, 8, 5


def main(job: Job) -> TopKTrace:
    """Generate some tokens and return their trace; the bits do not depend on the ranks."""
    torch.manual_seed(0)
    weight, embedding = torch.randn(V, D), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V, max_rows=ROWS)
    params = [SamplingParams(temperature=0.8, seed=seed, logprobs=TOP) for seed in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    trace = TopKTrace(ROWS, STEPS, TOP)

    token_ids = torch.arange(ROWS)
    for position in range(1, 1 + STEPS):
        out = sampler(F.embedding(token_ids, embedding), batch, position)
        trace.record(out)  # copied on the device; nobody waits
        token_ids = out.token_ids
    sampler.close()
    return trace


if __name__ == "__main__":
    with join() as job:
        trace = main(job)
        if job.rank == 0:
            for step in range(STEPS):
                drawn, entropy = int(trace.token_ids[0, step]), float(trace.entropies[0, step])
                likeliest = trace.top_token_ids[0, step].tolist()
                print(f"step {step}: drew {drawn}, entropy {entropy:.2f}, likeliest {likeliest}")
            # trace.save("trace.safetensors") keeps it.
