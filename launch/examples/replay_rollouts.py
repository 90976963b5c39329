"""A GRPO step whose trainer scores each token over the set that it was drawn from.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/replay_rollouts.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, seed_of
from tpsample.distributed import Job, join
from tpsample.training import KeptTokens, kept_logprobs

V, D, PROMPTS, GROUP, STEPS, T = 1000, 32, 3, 4, 6, 0.9


class Policy(nn.Module):
    """A toy in place of a model, whole on every rank, and this rank's rows of the LM head."""

    def __init__(self, shard: VocabShard) -> None:
        super().__init__()
        self.embedding, self.trunk = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True)
        head = torch.randn(V, D)
        self.head = nn.Parameter(head[shard.start : shard.stop].clone())

    def states(self, token_ids: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states, memory = self.trunk(self.embedding(token_ids), memory)
        return states, memory


@torch.no_grad()
def roll_out(policy: Policy, sampler: LMHeadSampler) -> tuple[Tensor, Tensor, KeptTokens]:
    """Return tokens [N, STEPS], and log-probabilities and sets of all, a step after the other."""
    texts = [(prompt, sample) for prompt in range(PROMPTS) for sample in range(GROUP)]
    asked = {"top_p": 0.8, "top_k": 200, "logprobs": 0, "logprobs_mode": "processed_logprobs"}
    params = [SamplingParams(temperature=T, seed=seed_of(7, *text), **asked) for text in texts]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=200)
    token_ids, memory, drawn, logprobs, kept = torch.tensor([p for p, _ in texts]), None, [], [], []
    for position in range(1, 1 + STEPS):
        states, memory = policy.states(token_ids.unsqueeze(1), memory)
        out = sampler(states[:, 0].contiguous(), batch, position)
        token_ids = out.token_ids
        drawn.append(token_ids)
        logprobs.append(out.logprobs.values[:, 0])
        kept.append(KeptTokens.of_step(out.kept))
    return torch.stack(drawn, dim=1), torch.cat(logprobs), KeptTokens.cat(kept)


def main(job: Job) -> dict[str, list[float]]:
    """Take a step; return the ratios before it, by whether the sets are replayed."""
    torch.manual_seed(0)
    shard = VocabShard.even(V, job.rank, job.world_size)
    policy = Policy(shard)
    with LMHeadSampler(policy.head, vocab_size=V, max_rows=PROMPTS * GROUP) as sampler:
        drawn, logprobs, kept = roll_out(policy, sampler)

    # The trainer computes the hidden states of whole texts anew, in other sums.
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP).unsqueeze(1)
    states, _ = policy.states(torch.cat([prompts, drawn[:, :-1]], dim=1))
    rows, tokens = states.transpose(0, 1).flatten(0, 1), drawn.T.flatten()
    scores = kept_logprobs(rows, policy.head, tokens, kept, T, shard=shard)
    ratio = (scores.logprobs - logprobs).exp()

    # A reward that counts even ids; its advantage is held against the group's.
    reward = (drawn % 2 == 0).double().sum(dim=1).view(PROMPTS, GROUP)
    advantage = (reward - reward.mean(dim=1, keepdim=True)) / (reward.std(dim=1, keepdim=True) + 1)
    loss = -(ratio * advantage.flatten().repeat(STEPS)).mean()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    loss.backward()  # the head's gradient is of its rows, the trunk's the same on every rank
    optimizer.step()

    everything = KeptTokens.from_lists([None] * len(tokens))  # what a trainer without sets does
    others = kept_logprobs(
        rows.detach(), sampler.weight.detach(), tokens, everything, T, shard=shard
    )
    return {"replayed": ratio.tolist(), "over all ids": (others.logprobs - logprobs).exp().tolist()}


if __name__ == "__main__":
    with join() as job:
        ratios = main(job)
        if job.rank == 0:
            for name, each in ratios.items():
                found = torch.tensor(each)
                least, most, mean = found.min(), found.max(), found.mean()
                print(f"{name}: ratios [{least:.6f}, {most:.6f}], mean {mean:.4f}")
