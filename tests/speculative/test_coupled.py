"""Coupled verification emits plain decoding's text, bit for bit."""

import math
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import uneven_shards
from tests.support.ranks import run_ranks
from tests.support.speculative import PROMPT, Toy, decode_plainly, decode_with_drafts, prompts
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference, verify

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


def _own_shard() -> VocabShard:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % 2:
        return VocabShard.even(V, rank, world_size)
    return uneven_shards(V, world_size)[rank]


def _texts(toy: Toy, guess: torch.Tensor, lengths: list[int], options: dict) -> list[torch.Tensor]:
    sampler = toy.sampler(_own_shard(), **options)
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


def test_noise_by_index_would_be_caught(plain, monkeypatch):
    """The planted defect: every position of a verification takes the noise of the first."""
    toy, expected = plain
    monkeypatch.setattr(
        import_module("tpsample.speculative.verify"),
        "position_of_rows",
        lambda positions, width: positions.repeat_interleave(width),
    )
    text, _ = decode_with_drafts(toy, toy.sampler(), PARAMS, LENGTH, 3, expected)
    random = torch.tensor([not request.greedy and request.top_k != 1 for request in PARAMS])
    assert (text[random] != expected[random]).any(dim=1).float().mean() > 0.9


def test_the_kernel_in_the_interpreter_verifies_the_same():
    toy = Toy.make(61)
    params = [SamplingParams(**REQUESTS[i], seed=i) for i in (0, 2, 4, 6)]
    drafts = torch.randint(0, 61, (4, 2), generator=torch.Generator().manual_seed(1))
    hidden_states = toy.table[:12].view(4, 3, -1)
    batch = SamplingBatch.from_params(params, vocab_size=61)
    logits = reference.logits(hidden_states.flatten(0, 1), toy.weight)
    first = reference.sample(logits[::3], batch, torch.full((4,), 9)).token_ids
    drafts[:2, 0] = first[:2]
    outs = [
        verify(toy.sampler(backend=backend), hidden_states, drafts, batch, 9)
        for backend in ("torch", "triton")
    ]
    assert (outs[0].num_accepted[:2] >= 1).all()
    for name in ("num_accepted", "token_ids", "status"):
        assert torch.equal(getattr(outs[0], name), getattr(outs[1], name))


def test_logprobs_are_those_of_the_emitted_tokens():
    toy = Toy.make(61)
    params = [
        SamplingParams(seed=1, logprobs=2),
        SamplingParams(seed=2),
        SamplingParams(seed=3, top_k=3, logprobs=0, logprobs_mode="processed_logprobs"),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=61)
    sampler = toy.sampler()
    hidden_states = toy.table[:9].view(3, 3, -1)
    positions = torch.tensor([4, 40, 400])
    plain = [sampler(hidden_states[:, i], batch, positions + i) for i in range(3)]
    drafts = torch.stack([plain[0].token_ids, plain[1].token_ids], dim=1)
    drafts[2, 1] = (drafts[2, 1] + 1) % 61
    out = verify(sampler, hidden_states, drafts, batch, positions)
    assert out.num_accepted.tolist() == [2, 2, 1]
    for row in range(3):
        for i in range(3):
            values, expected = out.logprobs.values[3 * row + i], plain[i].logprobs.values[row]
            if row == 2 and i == 2:
                assert values.isnan().all()
            else:
                assert torch.equal(values.nan_to_num(7), expected.nan_to_num(7))


def test_a_bad_position_ends_the_row_with_its_status():
    """NaN behind the end is never seen; where it is reached, the tokens before it stand."""
    sampler = LMHeadSampler(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    batch = SamplingBatch.from_params(SamplingParams(seed=3), vocab_size=40)
    hidden_states = torch.ones(3, 3, 4)
    token_id = int(sampler(hidden_states[:1, 0], batch, 5).token_ids)
    hidden_states[:, 1] = math.nan
    drafts = torch.tensor([[token_id, 1], [(token_id + 1) % 40, 1], [-1, 1]])
    out = verify(sampler, hidden_states, drafts, batch, 5)
    assert out.num_accepted.tolist() == [1, 0, 0]
    assert out.token_ids.tolist() == [[token_id, -1, -1]] * 3
    assert out.status.tolist() == [1, 0, 0]
