"""A trainer's log-probability, with its gradient, of the tokens that a step drew from kept sets."""

import torch
from torch import nn

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.distributed import Job, join
from tpsample.training import KeptTokens, kept_logprobs

V, D, B, T = 1000, 64, 4, 0.8


def main(job: Job) -> tuple[list[float], list[float]]:
    """Return the trainer's log-probabilities, and those that the step reported."""
    torch.manual_seed(0)
    lm_head, hidden_states = nn.Linear(D, V, bias=False), torch.randn(B, D, requires_grad=True)
    asked = {"top_p": 0.9, "logprobs": 0, "logprobs_mode": "processed_logprobs"}
    params = [SamplingParams(temperature=T, seed=seed, **asked) for seed in range(B)]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=V)
    with LMHeadSampler(lm_head, vocab_size=V, group="alone") as sampler:
        out = sampler(hidden_states, batch, 17)

    # log p = logit / T - logsumexp of logit / T over the kept set; T and the set have no gradient.
    kept = KeptTokens.of_step(out.kept)
    scores = kept_logprobs(hidden_states, lm_head.weight, out.token_ids, kept, T, group="alone")
    scores.logprobs.sum().backward()  # the policy's gradient
    assert hidden_states.grad is not None and lm_head.weight.grad is not None
    return scores.logprobs.tolist(), out.logprobs.values[:, 0].tolist()


if __name__ == "__main__":
    with join() as job:
        print(*main(job), sep="\n")
