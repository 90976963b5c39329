"""FSDP2: a rank samples from the rows of the head that it holds, also after a step of training."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference
from tpsample.distributed import Job, join

V, D, B = 1001, 64, 4


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of two steps, and those of the definition."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V, bias=False))
    trunk, lm_head = model[:2], model[2]
    for part in (trunk, lm_head):
        fully_shard(part)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = LMHeadSampler(lm_head)  # its DTensor brings shard and group
    batch = SamplingBatch.from_params([SamplingParams(seed=s) for s in range(B)], vocab_size=V)
    token_ids, found, expected = torch.arange(B), [], []
    for position in (1, 2):
        with torch.no_grad():
            hidden_states = trunk(token_ids)  # all ranks have the same tokens
            logits = reference.logits(hidden_states, lm_head.weight.full_tensor())
            expected += reference.sample(logits, batch, position).token_ids.tolist()
            token_ids = sampler(hidden_states, batch, position).token_ids
            found += token_ids.tolist()
        lm_head(trunk(token_ids)).logsumexp(dim=1).sum().backward()
        optimiser.step()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
