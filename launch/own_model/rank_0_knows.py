"""Rank 0 alone knows the requests, as in nano-vllm: it tells the others who comes and leaves."""

import torch
import torch.distributed as dist

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 2


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of some steps, and those of the definition."""
    weight = torch.randn(V, D, generator=torch.manual_seed(0))
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    batch = SamplingBatch.of_slots(8, vocab_size=V)  # empty, on every rank

    found, expected = [], []
    for step in range(4):
        told = [None] * 3
        if job.rank == 0:  # the scheduler: one request leaves, another comes
            request = SamplingParams(top_k=20, presence_penalty=1.2, seed=step)
            told = [request, [step - 2] * (step > 1), [[step, step - 1], [3, 4]]]
        dist.broadcast_object_list(told, src=0)
        batch.put(step, told[0])
        batch.free(told[1])
        slots, positions = torch.tensor(told[2])  # which of them step, and where
        hidden_states, rows = torch.randn(B, D), batch.select(slots)
        logits = reference.logits(hidden_states, weight)
        expected += reference.sample(logits, rows, positions).token_ids.tolist()
        out = sampler(hidden_states, rows, positions)
        rows.append(out)
        found += out.token_ids.tolist()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
