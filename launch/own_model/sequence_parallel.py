"""Sequence parallel: a rank has a part of every sequence, and the last positions are gathered."""

import torch
import torch.distributed as dist

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B, PART = 1000, 64, 4, 8


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of a step, and those of the definition."""
    torch.manual_seed(0)
    weight, whole = torch.randn(V, D), torch.randn(PART * job.world_size, B, D)
    own = whole.chunk(job.world_size)[job.rank]  # [S / R, B, D], as the trunk leaves it
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    lengths = torch.arange(B) + PART * job.world_size - B  # tokens in each sequence

    gathered = torch.empty_like(whole)
    dist.all_gather(list(gathered.chunk(job.world_size)), own.contiguous())
    hidden_states = gathered[lengths - 1, torch.arange(B)]  # of the last token of each sequence

    batch = SamplingBatch.from_params([SamplingParams(seed=s) for s in range(B)], vocab_size=V)
    token_ids = sampler(hidden_states, batch, lengths).token_ids
    logits = reference.logits(whole[lengths - 1, torch.arange(B)], weight)
    return token_ids.tolist(), reference.sample(logits, batch, lengths).token_ids.tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
