"""Rank 0 alone knows the requests, as in nano-vllm: changes of the batch travel, not requests."""

import torch
import torch.distributed as dist

from tpsample import Changes, LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 2


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of some steps, and those of the definition."""
    torch.manual_seed(0)
    weight = torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    batch = SamplingBatch.of_slots(8, vocab_size=V)  # empty, on every rank

    found, expected = [], []
    for step in range(4):
        work, changes = torch.zeros(2, B, dtype=torch.int64), Changes()
        if job.rank == 0:  # the scheduler: one request leaves, another comes
            changes.put(step, SamplingParams(top_k=20, presence_penalty=1.2, seed=step))
            changes.free([step - 2] * (step > 1))
            work = torch.tensor([[step, step - 1], [3, 4]])
        sampler.broadcast(batch, changes)
        dist.broadcast(work, src=0)  # which slots step, at which positions
        hidden_states, rows = torch.randn(B, D), batch.select(work[0])
        logits = reference.logits(hidden_states, weight)
        expected += reference.sample(logits, rows, work[1]).token_ids.tolist()
        out = sampler(hidden_states, rows, work[1])
        rows.append(out)
        found += out.token_ids.tolist()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
