"""A quantised head makes its own logits; tpsample does the rest, and gathers none of them.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/quantised_head.py
"""

from __future__ import annotations

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.distributed import Job, join

V, D = 1000, 64


class Int8Head:
    """This rank's rows of the head in 8 bits, with a scale per row."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(dim=1) / 127
        self.rows = (weight / self.scale.unsqueeze(1)).round().to(torch.int8)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [B, V_local] in fp32; yours is a kernel that reads int8."""
        return (hidden_states.float() @ self.rows.float().T) * self.scale


def main(job: Job) -> list[list[int]]:
    """Return the tokens of some steps."""
    torch.manual_seed(0)
    weight = torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    head = Int8Head(weight[shard.start : shard.stop])

    # [V_local, 0] is a head without a weight: this sampler takes logits.
    sampler = LMHeadSampler(torch.empty(len(shard), 0), vocab_size=V, shard=shard, max_rows=8)
    batch = SamplingBatch.from_params(
        [
            SamplingParams(temperature=0.8, top_p=0.9, seed=1),
            SamplingParams(temperature=0, logit_bias={17: 5.0}),
            SamplingParams(min_p=0.05, frequency_penalty=0.5, seed=2),
        ],
        vocab_size=V,
    )
    steps = []
    for position in range(10, 16):
        hidden_states = torch.randn(batch.rows, D)  # yours, equal on every rank
        token_ids = sampler.sample_logits(head.logits(hidden_states), batch, position).token_ids
        batch.append(token_ids)
        steps.append(token_ids.tolist())
    sampler.close()
    return steps


if __name__ == "__main__":
    with join() as job:
        steps = main(job)
        if job.rank == 0:
            print(*steps, sep="\n")
