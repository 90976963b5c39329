"""Megatron's head: the vocabulary is padded to 128 rows per rank before it is split."""

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 16


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of a step, and those of the definition over the whole head."""
    torch.manual_seed(0)
    multiple = 128 * job.world_size  # make_vocab_size_divisible_by times the ranks
    weight = torch.randn(-(-V // multiple) * multiple, D)  # from row V on there is padding
    own_rows = weight.chunk(job.world_size)[job.rank]  # output_layer.weight, of this rank
    hidden_states, positions = torch.randn(B, D), torch.full((B,), 17)

    shard = VocabShard.padded(V, job.rank, job.world_size, multiple=multiple)
    sampler = LMHeadSampler(own_rows, vocab_size=V, shard=shard)
    params = [SamplingParams(temperature=1.5, top_p=0.95, seed=seed) for seed in range(B)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    token_ids = sampler(hidden_states, batch, positions).token_ids

    logits = reference.logits(hidden_states, weight[:V])
    return token_ids.tolist(), reference.sample(logits, batch, positions).token_ids.tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
