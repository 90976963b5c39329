"""Coupled verification emits plain decoding's text, bit for bit."""

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import own_shard
from tests.support.ranks import run_ranks
from tests.support.speculative import PROMPT, Toy, decode_plainly, decode_with_drafts, prompts
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, verify

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


def _texts(toy: Toy, guess: torch.Tensor, lengths: list[int], options: dict) -> list[torch.Tensor]:
    sampler = toy.sampler(own_shard(V, even=dist.get_world_size() % 2 == 1), **options)
    texts = []
    for num_drafts in lengths:
        text, steps = decode_with_drafts(
            toy, sampler, PARAMS, LENGTH, num_drafts, guess, seed=num_drafts
        )
        assert steps < LENGTH + 4
        texts.append(text)
    return texts


@pytest.fixture(scope="session")
def plain() -> tuple[Toy, torch.Tensor]:
    """The model, and what one rank writes without drafts."""
    toy = Toy.make(V)
    text = decode_plainly(toy, toy.sampler(), PARAMS, LENGTH)
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
    sampler = toy.sampler()
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
