"""A model that returns logits: its head hands on its input, so hidden states come out."""

import torch
from torch import nn

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 2


@torch.no_grad()
def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of a step, and those of the definition."""
    torch.manual_seed(0)
    weight, token_ids = torch.randn(V, D), torch.randint(V, (B, 5))
    shard = VocabShard.even(V, job.rank, job.world_size)
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, len(shard), bias=False))  # yours
    trunk, lm_head = model
    lm_head.weight.copy_(weight[shard.start : shard.stop])

    sampler = LMHeadSampler(lm_head, vocab_size=V)
    lm_head.forward = lambda hidden_states: hidden_states  # now no product is made

    batch = SamplingBatch.from_params([SamplingParams(seed=s) for s in range(B)], vocab_size=V)
    found = sampler(model(token_ids)[:, -1], batch, 5).token_ids  # 5 tokens come before it
    logits = reference.logits(trunk(token_ids)[:, -1], weight)
    return found.tolist(), reference.sample(logits, batch, 5).token_ids.tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
