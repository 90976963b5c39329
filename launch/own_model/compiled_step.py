"""A decode step compiled whole, as gpt-fast's `decode_one_token` is: trunk, head and draw."""

import torch
from torch import Tensor

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.distributed import Job, join

V, D, B = 1000, 64, 2


def main(job: Job) -> tuple[list[int], list[int]]:
    """Return the tokens of some steps, and those of the definition."""
    torch.manual_seed(0)
    weight, embedding = torch.randn(V, D), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    sampler = LMHeadSampler(weight[shard.start : shard.stop], vocab_size=V)
    params = [SamplingParams(temperature=0.8, top_k=200, seed=seed) for seed in range(B)]
    batch = SamplingBatch.from_params(params, vocab_size=V)

    def decode_one_token(token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = embedding[token_ids].tanh()
        return sampler(hidden_states, batch, positions).token_ids, hidden_states

    # On a GPU leave the backend out; Inductor needs a C++ compiler on a CPU.
    step = torch.compile(decode_one_token, fullgraph=True, backend="aot_eager")
    token_ids, positions, found, expected = torch.arange(B), torch.full((B,), 3), [], []
    for _ in range(3):
        token_ids, hidden_states = step(token_ids, positions)
        logits = reference.logits(hidden_states, weight)
        expected += reference.sample(logits, batch, positions).token_ids.tolist()
        found += token_ids.tolist()
        positions = positions + 1
    return found, expected


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
