"""An engine that has its parameters as tensors, in memory that it writes between steps."""

import torch

from tpsample import LMHeadSampler, Needs, SamplingBatch, VocabShard, reference
from tpsample.distributed import Job, join

V, D, S = 1000, 64, 8


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of some steps, and those of the definition."""
    torch.manual_seed(0)
    weight = torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    temperature, top_k = torch.ones(S), torch.zeros(S, dtype=torch.int32)
    seed, positions = torch.arange(S), torch.full((S,), 9)
    batch = SamplingBatch.over(vocab_size=V, temperature=temperature, seed=seed, top_k=top_k)

    found, expected = [], []
    for step in range(3):
        temperature.copy_(torch.rand(S))  # yours; every rank writes the same
        top_k.copy_(torch.randint(1, 50, (S,)))
        batch.needs = Needs(top_k=step > 0)  # without a filter a step stores no logits
        positions += 1
        hidden_states = torch.randn(S, D)
        logits = reference.logits(hidden_states, weight)
        expected += reference.sample(logits, batch, positions).token_ids.tolist()
        found += sampler(hidden_states, batch, positions).token_ids.tolist()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
