"""The same tokens as "gather the logits and sample them", which a rank alone does here."""

import torch
import torch.distributed as dist

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.distributed import Job, join

V, D, B = 1008, 64, 8  # 2, 3 and 4 ranks divide V, because gloo gathers equal parts


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens drawn on shards, and those drawn from gathered logits."""
    torch.manual_seed(0)
    weight, hidden_states = torch.randn(V, D), torch.randn(B, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    own_rows = weight[shard.start : shard.stop]
    batch = SamplingBatch.from_params(
        [SamplingParams(temperature=0.8, top_p=0.9, seed=s) for s in range(B)], vocab_size=V
    )
    with LMHeadSampler(own_rows, vocab_size=V) as sampler:
        on_shards = sampler(hidden_states, batch, 17).token_ids

    logits = [torch.empty(B, V // job.world_size) for _ in range(job.world_size)]
    dist.all_gather(logits, hidden_states @ own_rows.T)  # what engines do, 4 · B · V bytes
    with LMHeadSampler(torch.empty(V, 0), vocab_size=V, group="alone") as alone:
        gathered = alone.sample_logits(torch.cat(logits, dim=1), batch, 17).token_ids
    return on_shards.tolist(), gathered.tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
