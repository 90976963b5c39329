"""Speculative decoding with a drafter: the text of plain decoding, in fewer steps.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        launch/examples/speculative_decoding.py

The drafter has a head of its own, and samples with the seeds and positions of the target. So where
it would draw from a similar law, it draws the same token, and its draft is accepted.
"""

from __future__ import annotations

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify
from tpsample.distributed import Job, join

V, D, LENGTH, K = 500, 32, 24, 3
PARAMS = [SamplingParams(temperature=0.7, top_p=0.95, seed=seed) for seed in (1, 2)]
PROMPT = [[5, 6], [7, 8]]


def hidden_state(text: list[int], embedding: torch.Tensor, *, depth: int) -> torch.Tensor:
    """Return [D]: what the last `depth` tokens make of it. Yours is a transformer."""
    found = torch.zeros(D)
    for back, token_id in enumerate(reversed(text[-depth:])):
        found = found + embedding[token_id].roll(back) * 0.3**back
    return found


def main(job: Job) -> tuple[list[list[int]], int]:
    """Return both texts, which are equal to plain decoding's, and the steps they took."""
    torch.manual_seed(0)
    embedding, weight = torch.randn(V, D), torch.randn(V, D)
    shard = VocabShard.even(V, job.rank, job.world_size)
    own_rows = weight[shard.start : shard.stop]
    target = LMHeadSampler(own_rows, vocab_size=V, max_rows=len(PARAMS) * (K + 1))
    drafter = LMHeadSampler(own_rows.clone(), vocab_size=V, max_rows=len(PARAMS))
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V)

    texts, steps = [list(each) for each in PROMPT], 0
    while min(map(len, texts)) < LENGTH:
        first = torch.tensor([len(text) for text in texts])
        drafted = [list(text) for text in texts]
        for ahead in range(K):  # a cheap model, one token at a time
            states = [hidden_state(text, embedding, depth=1) for text in drafted]
            draft = drafter(torch.stack(states), batch, first + ahead).token_ids
            for text, token_id in zip(drafted, draft.tolist(), strict=True):
                text.append(token_id)

        # The target sees all K + 1 positions in one pass.
        states = [
            hidden_state(text[: len(text) - K + i], embedding, depth=2)
            for text in drafted
            for i in range(K + 1)
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
