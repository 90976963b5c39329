"""Pipeline parallel: the last stage has the head, and the first stage is told the tokens."""

import torch
import torch.distributed as dist

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 4


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens as each rank of each stage knows them, and those of the definition."""
    torch.manual_seed(0)
    weight, hidden_states = torch.randn(V, D), torch.randn(B, D)
    per_stage = job.world_size // 2  # two stages, each tensor parallel
    stages = [list(range(per_stage)), list(range(per_stage, 2 * per_stage))]
    groups = [dist.new_group(ranks) for ranks in stages]
    pairs = [dist.new_group([rank, rank + per_stage]) for rank in stages[0]]
    place = job.rank % per_stage

    batch = SamplingBatch.from_params([SamplingParams(seed=s) for s in range(B)], vocab_size=V)
    token_ids = torch.empty(B, dtype=torch.int64)
    if job.rank in stages[1]:  # only these ranks build a sampler
        shard = VocabShard.even(V, place, per_stage)
        own_rows = weight[shard.start : shard.stop]
        sampler = LMHeadSampler(own_rows, vocab_size=V, group=groups[1])
        token_ids = sampler(hidden_states, batch, 17).token_ids
    dist.broadcast(token_ids, src=per_stage + place, group=pairs[place])

    logits = reference.logits(hidden_states, weight)
    return token_ids.tolist(), reference.sample(logits, batch, 17).token_ids.tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
