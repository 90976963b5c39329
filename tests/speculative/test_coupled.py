"""Coupled verification emits plain decoding's text, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.cases import own_sampler
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify

CONTEXTS = 509
PROMPT = 3
V, LENGTH = 211, 14
REQUESTS = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 40, "ties": "keep", "temperature": 1.3},
    {"top_p": 0.8},
    {"top_p": 0.4, "temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.7, "filter_order": "joint"},
    {"top_k": 1},
    {"temperature": 0.5, "repetition_penalty": 1.4, "frequency_penalty": 0.7},
    {
        "temperature": 0.5,
        "presence_penalty": 1.5,
        "bad_words": [[i, j] for i in range(9) for j in range(0, V, 7)],
        "logit_bias": dict.fromkeys(range(9), 4.0),
    },
    {"allowed_token_ids": list(range(0, V, 9)), "min_tokens": 6, "stop_token_ids": [0, 9, 18]},
)
ROWS = 3 * len(REQUESTS)
PARAMS = [SamplingParams(**REQUESTS[row % len(REQUESTS)], seed=500 + row) for row in range(ROWS)]


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


def _texts(toy: Toy, guess: Tensor, lengths: list[int], options: dict) -> list[Tensor]:
    even = dist.get_world_size() % 2 == 1
    sampler = own_sampler(toy.weight, even=even, max_rows=1024, **options)
    texts = []
    for num_drafts in lengths:
        text, steps = decode_with_drafts(
            toy, sampler, PARAMS, LENGTH, num_drafts, guess, seed=num_drafts
        )
        assert steps < LENGTH + 4
        texts.append(text)
    return texts


@pytest.fixture(scope="session")
def plain() -> tuple[Toy, Tensor]:
    """The model, and what one rank writes without drafts."""
    toy = Toy.make(V)
    text = decode_plainly(toy, own_sampler(toy.weight, max_rows=1024), PARAMS, LENGTH)
    assert len({tuple(row) for row in text.tolist()}) > ROWS * 3 // 4
    return toy, text


@pytest.mark.parametrize(
    ("world_size", "lengths", "options"),
    [
        (1, [1, 4, 8], {}),
        (2, [1, 4], {"exchange": "p2p", "chunks": 3}),
        *long(
            (1, [2, 3, 5, 6, 7], {}),
            (2, [7], {"exchange": "p2p", "chunks": 3}),
            (3, [2, 5, 8], {}),
            (4, [3, 6], {"chunks": 2, "philox_rounds": 10}),
            (8, [1, 8], {}),
        ),
    ],
    ids=lambda value: f"W={value}" if isinstance(value, int) else None,
)
def test_the_text_is_that_of_plain_decoding(plain, world_size, lengths, options):
    """A quarter of the drafts is wrong, rows are ragged."""
    toy, expected = plain
    for texts in run_ranks(world_size, _texts, toy, expected, lengths, options):
        for num_drafts, text in zip(lengths, texts, strict=True):
            wrong = (text != expected).any(dim=1).nonzero().flatten().tolist()
            assert not wrong, f"K={num_drafts}: {[PARAMS[row] for row in wrong]}"


def test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens(plain):
    toy, expected = plain
    sampler = own_sampler(toy.weight, max_rows=1024)
    batch = SamplingBatch.from_params(PARAMS, vocab_size=V, prompt_token_ids=prompts(ROWS).tolist())
    text = torch.cat([prompts(ROWS), expected], dim=1)
    hidden_states = toy.hidden_states(text[:, 1 : PROMPT + 8].unfold(1, 2, 1))
    drafts = expected[:, :8]
    out = verify(sampler, hidden_states[:, :9], drafts, batch, PROMPT)
    assert (out.num_accepted == 8).all()
    assert torch.equal(out.token_ids, expected[:, :9])

    wrong = drafts.clone()
    wrong[:, 3] = (wrong[:, 3] + 1) % V
    out = verify(sampler, hidden_states[:, :9], wrong, batch, PROMPT)
    assert (out.num_accepted == 3).all()
    assert torch.equal(out.token_ids[:, :4], expected[:, :4])
    assert (out.token_ids[:, 4:] == -1).all()
