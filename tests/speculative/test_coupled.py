"""Coupled verification emits plain decoding's text, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases import own_sampler
from tests.support.fields import OTHER_FILTERS, one_with
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify

CONTEXTS = 509
PROMPT = 3
V, LENGTH = 211, 14
REQUESTS: tuple[dict[str, Any], ...] = (
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
    *one_with(OTHER_FILTERS),
)
ROWS = 3 * len(REQUESTS)
PARAMS = [SamplingParams(**REQUESTS[row % len(REQUESTS)], seed=500 + row) for row in range(ROWS)]


GENERATOR = torch.Generator().manual_seed(V)
TABLE = torch.randn(CONTEXTS, 12, generator=GENERATOR)
WEIGHT = 0.9 * torch.randn(V, 12, generator=GENERATOR)
PROMPTS = (torch.arange(ROWS * PROMPT).view(ROWS, PROMPT) * 5 + 1) % 16


def hidden_states(last_two: Tensor) -> Tensor:
    """[..., D] of int64 [..., 2], the last two tokens: the same bits every time."""
    return TABLE[(7 * last_two[..., 0] + 31 * last_two[..., 1] + 5) % CONTEXTS]


def new_batch() -> SamplingBatch:
    return SamplingBatch.from_params(PARAMS, vocab_size=V, prompt_token_ids=PROMPTS.tolist())


def decode(
    sampler: LMHeadSampler, guess: Tensor | None = None, num_drafts: int = 0
) -> tuple[Tensor, int]:
    """The text, int64 [B, LENGTH], by plain steps or by verification; and the number of steps.

    Args:
        guess: int64 [B, LENGTH], what the drafter believes; every fourth draft is another token,
            and rows take drafts of different length, some none.
    """
    batch, generator = new_batch(), torch.Generator().manual_seed(num_drafts)
    text, steps = PROMPTS.tolist(), 0
    while min(map(len, text)) < PROMPT + LENGTH:
        tails = torch.tensor([row[-2:] for row in text])
        positions = torch.tensor([len(row) for row in text])
        if guess is None:
            out: Any = sampler(hidden_states(tails), batch, positions)
        else:
            done = (positions - PROMPT).clamp(max=LENGTH).unsqueeze(1) + torch.arange(num_drafts)
            drafts = F.pad(guess, (0, num_drafts)).gather(1, done)
            wrong = torch.rand(drafts.shape, generator=generator) < 0.25
            drafts = torch.where(wrong, (drafts + 1) % V, drafts)
            count = torch.randint(0, num_drafts + 2, (ROWS, 1), generator=generator)
            drafts = drafts.where(torch.arange(num_drafts) < count, -1)
            context = torch.cat([tails, drafts.clamp(min=0)], dim=1).unfold(1, 2, 1)
            out = verify(sampler, hidden_states(context), drafts, batch, positions)
        assert (out.status == 0).all()
        batch.append(out.token_ids)
        for row, emitted in zip(text, out.token_ids.view(ROWS, -1).tolist(), strict=True):
            row += [token_id for token_id in emitted if token_id >= 0]
        steps += 1
    return torch.tensor([row[PROMPT : PROMPT + LENGTH] for row in text]), steps


def _texts(guess: Tensor, lengths: list[int], options: dict) -> list[Tensor]:
    even = dist.get_world_size() % 2 == 1
    sampler = own_sampler(WEIGHT, even=even, max_rows=1024, **options)
    texts = []
    for num_drafts in lengths:
        text, steps = decode(sampler, guess, num_drafts)
        assert steps < LENGTH + 4
        texts.append(text)
    return texts


@pytest.fixture(scope="session")
def plain() -> Tensor:
    """The text of one rank, without drafts."""
    text, _ = decode(own_sampler(WEIGHT, max_rows=1024))
    assert len({tuple(row) for row in text.tolist()}) > ROWS * 3 // 4
    return text


@pytest.mark.parametrize(
    ("world_size", "lengths", "options"),
    [
        (1, [1, 4, 8], {}),
        (2, [1, 4], {"exchange": "p2p", "chunks": 3}),
        *long(
            (1, [2, 3, 5, 6, 7], {}),
            (2, [7], {"exchange": "p2p", "chunks": 3}),
            (3, [2, 5, 8], {}),
            (4, [3, 6], {"chunks": 2}),
            (8, [1, 8], {}),
        ),
    ],
    ids=lambda value: f"W={value}" if isinstance(value, int) else None,
)
def test_the_text_is_that_of_plain_decoding(plain, world_size, lengths, options):
    """A quarter of the drafts is wrong, rows are ragged."""
    for texts in run_ranks(world_size, _texts, plain, lengths, options):
        for num_drafts, text in zip(lengths, texts, strict=True):
            wrong = (text != plain).any(dim=1).nonzero().flatten().tolist()
            assert not wrong, f"K={num_drafts}: {[PARAMS[row] for row in wrong]}"


def test_a_perfect_drafter_needs_a_step_per_k_plus_1_tokens(plain):
    sampler, batch = own_sampler(WEIGHT, max_rows=1024), new_batch()
    text = torch.cat([PROMPTS, plain], dim=1)
    states = hidden_states(text[:, 1 : PROMPT + 8].unfold(1, 2, 1))
    drafts = plain[:, :8]
    out = verify(sampler, states, drafts, batch, PROMPT)
    assert (out.num_accepted == 8).all()
    assert torch.equal(out.token_ids, plain[:, :9])

    wrong = drafts.clone()
    wrong[:, 3] = (wrong[:, 3] + 1) % V
    out = verify(sampler, states, wrong, batch, PROMPT)
    assert (out.num_accepted == 3).all()
    assert torch.equal(out.token_ids[:, :4], plain[:, :4])
    assert (out.token_ids[:, 4:] == -1).all()
