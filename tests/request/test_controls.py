"""Penalties and constraints: the definition against the oracle, ranks against the definition."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.controls import Conversation, batch_of
from tests.support.memory import cost_of
from tests.support.ranks import run_ranks, same_on_ranks
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, reference

V, D = 331, 8
_batch = functools.partial(batch_of, vocab_size=V)


def _conversations(seed: int, rows: int, vocab_size: int = V) -> list[Conversation]:
    rng = random.Random(seed)
    return [Conversation.random(rng, vocab_size) for _ in range(rows)]


def test_the_definition_is_what_the_oracle_says():
    talks = _conversations(1, 120)
    logits = 4 * torch.randn(len(talks), V, generator=torch.Generator().manual_seed(2))
    logits[5, 7], logits[6, 8], logits[7, 9] = torch.nan, torch.inf, -torch.inf
    expected = torch.stack([talk.processed(row) for talk, row in zip(talks, logits, strict=True)])
    processed = reference.processed_logits(logits, _batch(talks))
    assert torch.allclose(processed, expected, rtol=0, atol=0, equal_nan=True)


def _steps(talks: list[Conversation], weight: torch.Tensor) -> list[list[int]]:
    sampler, batch = own_sampler(weight, even=False, max_rows=len(talks)), _batch(talks)
    tokens, generator = [], torch.Generator().manual_seed(2)
    for step in range(6):
        out = sampler(torch.randn(len(talks), D, generator=generator) / 4, batch, step)
        batch.append(out.token_ids)
        tokens.append(out.token_ids.tolist())
    return tokens


@pytest.mark.parametrize("world_size", [3, *long(2, 4, 8)])
def test_random_requests_draw_the_same_tokens_on_ranks(world_size):
    """On one rank test_fuzz judges them."""
    talks = _conversations(100, 300)
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    expected = _steps(talks, weight)
    assert same_on_ranks(world_size, _steps, talks, weight) == expected


def _largest_tensor(vocab_size: int, rows: int) -> int:
    """Elements of the largest tensor of building a batch, two steps and an append."""
    talks = _conversations(5, rows, vocab_size)
    for talk in talks:  # a list of ids is the request's, not state
        talk.params = replace(talk.params, allowed_token_ids=[1, 2], bad_words=[[2, 1]])
    sampler = own_sampler(torch.zeros(vocab_size, 2))

    def steps() -> None:
        batch = batch_of(talks, vocab_size)
        for _ in range(2):
            batch.append(sampler(torch.zeros(rows, 2), batch, 0).token_ids)
        tables = batch.view(rows).controls.tables
        assert tables.has_penalties and tables.has_bias

    return cost_of(sampler, steps)[1]


def test_no_rank_has_a_tensor_over_the_vocabulary():
    """[rows, V / 4] at most on 4 ranks, and on one rank [rows, V]: the count sees it."""
    vocab_size, rows = 8192, 48
    for elements in run_ranks(4, _largest_tensor, vocab_size, rows):
        assert elements <= 1.1 * rows * vocab_size / 4
    (alone,) = run_ranks(1, _largest_tensor, vocab_size, rows)
    assert alone >= rows * vocab_size


def test_several_tokens_at_once_are_counted_in_order():
    params = SamplingParams(frequency_penalty=1.0, bad_words=[[5, 6, 7]], min_tokens=3,
                            stop_token_ids=[1])  # fmt: skip
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch.from_params([params] * 2, vocab_size=9)
    reference.processed_logits(logits, batch)
    batch.append(torch.tensor([[5, 6, -1], [5, 5, 6]]))
    fresh = SamplingBatch.from_params(
        [params] * 2, vocab_size=9, output_token_ids=[[5, 6], [5, 5, 6]]
    )
    assert torch.equal(
        reference.processed_logits(logits, batch), reference.processed_logits(logits, fresh)
    )


def test_drafts_count_cumulatively_and_leave_no_trace():
    talks = _conversations(21, 30)
    for talk in talks:
        talk.output = talk.output or [3]
    rng = random.Random(22)
    drafts = [[rng.randrange(6) for _ in range(4)] for _ in talks]
    logits = torch.randn(30, 5, V, generator=torch.Generator().manual_seed(23))
    batch = _batch(talks)
    before = reference.processed_logits(logits[:, 0], batch)
    drafted = batch.with_drafts(torch.tensor(drafts))
    processed = reference.processed_logits(logits.flatten(0, 1), drafted).view_as(logits)
    for row, talk in enumerate(talks):
        for i in range(5):
            longer = Conversation(talk.params, talk.prompt, talk.output + drafts[row][:i])
            assert torch.equal(processed[row, i], longer.processed(logits[row, i])), (row, i)
    assert torch.equal(reference.processed_logits(logits[:, 0], batch), before)
