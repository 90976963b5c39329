"""Speculative decoding with a drafter: the text of plain decoding, in fewer steps.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/speculative_decoding.py

The drafter exits early: it runs the first layer of the model, then its head, with the seeds and
positions of the target. So where its law is similar, it draws the same token, which is accepted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify
from tpsample.distributed import Job, join

V, D, LAYERS, LENGTH, K = 500, 32, 4, 24, 3
PARAMS = [SamplingParams(temperature=0.7, top_p=0.95, seed=seed) for seed in (1, 2)]
PROMPT = [[5, 6], [7, 8]]


class Model:
    """A stack of residual layers over the last token. Yours is a transformer."""

    def __init__(self) -> None:
        self.embedding = torch.randn(V, D)
        self.layers = torch.randn(LAYERS, D, D) * 0.05

    def hidden_state(self, token_id: int, *, layers: int = LAYERS) -> torch.Tensor:
        """Return [D], what the first `layers` layers make of a token."""
        state = F.embedding(torch.tensor(token_id), self.embedding)  # raises for -1, no token
        for layer in self.layers[:layers]:
            state = state + torch.tanh(layer @ state)
        return state


def main(job: Job) -> tuple[list[list[int]], int]:
    """Return both texts, which are equal to plain decoding's, and the steps they took."""
    torch.manual_seed(0)
    model, weight = Model(), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    own_rows = weight[shard.start : shard.stop]
    target = LMHeadSampler(own_rows, vocab_size=V, max_rows=len(PARAMS) * (K + 1))
    drafter = LMHeadSampler(own_rows, vocab_size=V, max_rows=len(PARAMS))
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V)

    texts, steps = [list(each) for each in PROMPT], 0
    while min(map(len, texts)) < LENGTH:
        first = torch.tensor([len(text) for text in texts])
        drafted = [list(text) for text in texts]
        for ahead in range(K):  # one token at a time
            states = [model.hidden_state(text[-1], layers=1) for text in drafted]
            draft = drafter(torch.stack(states), batch, first + ahead).token_ids
            for text, token_id in zip(drafted, draft.tolist(), strict=True):
                text.append(token_id)

        # The target sees all K + 1 positions in one pass.
        states = [
            model.hidden_state(token_id)
            for text in drafted
            for token_id in text[len(text) - K - 1 :]
        ]
        drafts = torch.tensor([text[len(text) - K :] for text in drafted], dtype=torch.int64)
        hidden_states = torch.stack(states).view(len(texts), K + 1, D)
        out = verify(target, hidden_states, drafts, batch, first)
        for text, emitted in zip(texts, out.token_ids.tolist(), strict=True):
            text += [token_id for token_id in emitted if token_id >= 0]
        batch.append(out.token_ids)
        steps += 1
    target.close()
    drafter.close()
    return [text[:LENGTH] for text in texts], steps


if __name__ == "__main__":
    with join() as job:
        texts, steps = main(job)
        if job.rank == 0:
            print(*texts, sep="\n")
            print(f"{LENGTH - len(PROMPT[0])} tokens per text in {steps} steps")
