"""An engine that has its parameters as tensors, and on the host as well."""

import torch

from tpsample import LMHeadSampler, SamplingBatch, VocabShard, reference
from tpsample.distributed import Job, join

V, D, S = 1000, 64, 8


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of some steps, and those of the definition."""
    torch.manual_seed(0)
    weight = torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    seed, positions, found, expected = torch.arange(S), torch.full((S,), 9), [], []
    for step in range(3):
        temperature = torch.rand(S)  # yours; every rank has the same
        top_k = [5 * step * (row % 2) for row in range(S)]  # in the first step no row has one
        filters = {"top_k": torch.tensor(top_k)} if any(top_k) else {}
        host = {"top_k": top_k} if any(top_k) else None  # a GPU then does what these rows need
        batch = SamplingBatch.from_tensors(
            vocab_size=V, temperature=temperature, seed=seed, **filters, host=host
        )
        positions += 1
        hidden_states = torch.randn(S, D)
        logits = reference.logits(hidden_states, weight)
        expected += reference.sample(logits, batch, positions).token_ids.tolist()
        found += sampler(hidden_states, batch, positions).token_ids.tolist()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
