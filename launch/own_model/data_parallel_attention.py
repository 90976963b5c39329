"""Each rank has rows of its own in front of a tensor-parallel head; counts differ, and may be 0."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, S = 1000, 64, 4  # slots of a rank


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of this rank's own rows, and those of the definition."""
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    batch = SamplingBatch.of_slots(S * job.world_size, vocab_size=V)
    slots = torch.arange(S) + S * job.rank  # of this rank's requests
    params = [SamplingParams(top_p=0.9, seed=slot) for slot in slots.tolist()]
    dist.all_gather_object(everybodys := [None] * job.world_size, params)
    batch.put(range(S * job.world_size), [each for its in everybodys for each in its])
    found, expected = [], []
    for step, count in enumerate((S - job.rank, 0 if job.rank else 2)):  # unequal, and empty
        own, at = torch.randn(count, D) + job.rank, 10 + step  # gather unequal positions, too
        most = max(job.gather(count))  # rows are padded to these; a slot of -1 is padding
        padded = F.pad(own, (0, 0, 0, most - count)), F.pad(slots[:count] + 1, (0, most - count))
        whole = [x.new_empty(most * job.world_size, *x.shape[1:]) for x in padded]
        for room, x in zip(whole, padded, strict=True):
            dist.all_gather(list(room.chunk(job.world_size)), x)
        out = sampler(whole[0], batch.select(whole[1] - 1), at)
        found += out.token_ids[job.rank * most :][:count].tolist()
        its = SamplingBatch.from_params(params[:count], vocab_size=V)
        expected += reference.sample(reference.logits(own, weight), its, at).token_ids.tolist()
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
