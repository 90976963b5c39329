"""A language model that costs nothing, and inputs for verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify

CONTEXTS = 509
PROMPT = 3


@dataclass(frozen=True)
class Toy:
    """The hidden state of a token is looked up by the last two tokens: the same bits every time.

    Attributes:
        table: [509, D].
        weight: [V, D].
    """

    table: Tensor
    weight: Tensor

    @staticmethod
    def make(vocab_size: int, hidden_size: int = 12) -> Toy:
        generator = torch.Generator().manual_seed(vocab_size)
        table = torch.randn(CONTEXTS, hidden_size, generator=generator)
        return Toy(table, 0.9 * torch.randn(vocab_size, hidden_size, generator=generator))

    def hidden_states(self, last_two: Tensor) -> Tensor:
        """[..., D] of int64 [..., 2]."""
        return self.table[(7 * last_two[..., 0] + 31 * last_two[..., 1] + 5) % CONTEXTS]

    def sampler(self, shard: VocabShard | None = None, **options) -> LMHeadSampler:
        shard = shard or VocabShard(0, len(self.weight))
        return LMHeadSampler(
            self.weight[shard.start : shard.stop],
            vocab_size=len(self.weight),
            shard=shard,
            **({"max_rows": 1024, "backend": "torch"} | options),
        )


def prompts(rows: int) -> Tensor:
    """int64 [rows, PROMPT], ids below 16."""
    return (torch.arange(rows * PROMPT).view(rows, PROMPT) * 5 + 1) % 16


def decode_plainly(
    toy: Toy, sampler: LMHeadSampler, params: list[SamplingParams], length: int
) -> Tensor:
    """int64 [B, length], one token per row and step."""
    batch = SamplingBatch.from_params(
        params, vocab_size=len(toy.weight), prompt_token_ids=prompts(len(params)).tolist()
    )
    text = prompts(len(params))
    for step in range(length):
        out = sampler(toy.hidden_states(text[:, -2:]), batch, PROMPT + step)
        assert (out.status == 0).all()
        batch.append(out.token_ids)
        text = torch.cat([text, out.token_ids.unsqueeze(1)], dim=1)
    return text[:, PROMPT:]


def decode_with_drafts(
    toy: Toy,
    sampler: LMHeadSampler,
    params: list[SamplingParams],
    length: int,
    num_drafts: int,
    guess: Tensor,
    *,
    method: str = "coupled",
    seed: int = 0,
) -> tuple[Tensor, int]:
    """The text by verification, and the number of target steps.

    Args:
        guess: int64 [B, length], what the drafter believes; every fourth draft is another token,
            and rows take drafts of different length, some none.
    """
    rows, vocab_size = len(params), len(toy.weight)
    batch = SamplingBatch.from_params(
        params, vocab_size=vocab_size, prompt_token_ids=prompts(rows).tolist()
    )
    generator = torch.Generator().manual_seed(seed)
    text = [list(prompt) for prompt in prompts(rows).tolist()]
    guess = torch.cat([guess, guess.new_zeros(rows, num_drafts)], dim=1)
    steps = 0
    while min(map(len, text)) < PROMPT + length:
        done = torch.tensor([min(len(row) - PROMPT, length) for row in text])
        drafts = guess.gather(1, done.unsqueeze(1) + torch.arange(num_drafts))
        wrong = torch.rand(drafts.shape, generator=generator) < 0.25
        drafts = torch.where(wrong, (drafts + 1) % vocab_size, drafts)
        count = torch.randint(0, num_drafts + 2, (rows, 1), generator=generator)
        drafts = drafts.where(torch.arange(num_drafts) < count, -1)

        tails = torch.tensor([row[-2:] for row in text])
        context = torch.cat([tails, drafts.clamp(min=0)], dim=1).unfold(1, 2, 1)
        positions = torch.tensor([len(row) for row in text])
        out = verify(sampler, toy.hidden_states(context), drafts, batch, positions, method=method)
        assert (out.status == 0).all()
        batch.append(out.token_ids)
        for row, emitted in zip(text, out.token_ids.tolist(), strict=True):
            row += [token_id for token_id in emitted if token_id >= 0]
        steps += 1
    return torch.tensor([row[PROMPT : PROMPT + length] for row in text]), steps
