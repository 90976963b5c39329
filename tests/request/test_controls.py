"""Penalties and constraints: the definition against the oracle, ranks against the definition."""

import functools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support import oracle
from tests.support.cases import own_sampler
from tests.support.controls import Conversation, batch_of, bitmask_of
from tests.support.memory import Largest
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference

V, D = 331, 8
_batch = functools.partial(batch_of, vocab_size=V)


def _conversations(seed: int, rows: int, vocab_size: int = V) -> list[Conversation]:
    rng = random.Random(seed)
    return [Conversation.random(rng, vocab_size) for _ in range(rows)]


def _head(seed: int, rows: int, vocab_size: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(rows, D, generator=generator)
    return hidden_states, torch.randn(vocab_size, D, generator=generator)


def test_the_definition_is_what_the_oracle_says():
    talks = _conversations(1, 120)
    logits = 4 * torch.randn(len(talks), V, generator=torch.Generator().manual_seed(2))
    logits[5, 7], logits[6, 8], logits[7, 9] = torch.nan, torch.inf, -torch.inf
    expected = torch.stack([talk.processed(row) for talk, row in zip(talks, logits, strict=True)])
    processed = reference.processed_logits(logits, _batch(talks))
    assert torch.allclose(processed, expected, rtol=0, atol=0, equal_nan=True)


def test_grammar_and_forced_tokens_are_what_the_oracle_says():
    talks = _conversations(3, 40)
    rng = random.Random(4)
    grammars = [set(rng.sample(range(V), 40)) if row % 2 else None for row in range(40)]
    forced = [rng.randrange(V) if row % 5 == 0 else -1 for row in range(40)]
    logits = torch.randn(40, V, generator=torch.Generator().manual_seed(5))
    batch = _batch(talks)
    batch.grammar_bitmask = bitmask_of(grammars, V)
    batch.forced_token_ids = torch.tensor(forced)
    expected = torch.stack(
        [
            talk.processed(row, grammar=grammar and oracle.bits(grammar, V), forced=f)
            for talk, row, grammar, f in zip(talks, logits, grammars, forced, strict=True)
        ]
    )
    assert torch.equal(reference.processed_logits(logits, batch), expected)
    out = reference.sample(logits, batch, 0)
    wanted = torch.tensor(forced)
    assert torch.equal(out.token_ids[wanted >= 0], wanted[wanted >= 0])
    batch.grammar_bitmask = batch.forced_token_ids = None
    plain = torch.stack([talk.processed(row) for talk, row in zip(talks, logits, strict=True)])
    assert torch.equal(reference.processed_logits(logits, batch), plain)


def _sample_random_rows(cases: list) -> list[str]:
    wrong = []
    for number, (talks, hidden_states, weight, positions, expected, later) in enumerate(cases):
        exchange = ("collective", "p2p")[number // 2 % 2]
        options = {"exchange": exchange, "chunks": 1 + number % 3, "max_rows": len(talks)}
        sampler = own_sampler(weight, even=number % 2 == 0, **options)
        batch = batch_of(talks, len(weight))
        for step, oracle_out in enumerate((expected, later)):
            out = sampler(hidden_states, batch, positions + step)
            bad = (out.token_ids != oracle_out.token_ids) | (out.status != oracle_out.status)
            wrong += [f"case {number} row {row}: {talks[row]}" for row in bad.nonzero().flatten()]
            batch.append(out.token_ids)
        # History and bias are 4 bytes per row and id of the shard; bits and padding are the rest.
        state = batch.view(batch.rows).controls.tables.state(sampler.shard)
        kept = (state.history, state.bias, state.touched, state.mask_buffer(len(talks)))
        assert sum(each.nbytes for each in kept) <= 9 * len(talks) * (len(sampler.shard) + 67)
        sampler.close()
    return wrong


@pytest.fixture(scope="session")
def random_cases() -> list:
    """2,400 rows of random combinations of every parameter, and the oracle of two steps."""
    cases = []
    for number, vocab_size in enumerate([331, 331, 97, 1024]):
        talks = _conversations(100 + number, 600, vocab_size)
        hidden_states, weight = _head(number, 600, vocab_size)
        positions = torch.arange(600) * 7
        logits = reference.logits(hidden_states, weight)
        out = reference.sample(logits, batch_of(talks, vocab_size), positions)
        longer = [
            Conversation(talk.params, talk.prompt, [*talk.output, *[drawn] * (drawn >= 0)])
            for talk, drawn in zip(talks, out.token_ids.tolist(), strict=True)
        ]
        later = reference.sample(logits, batch_of(longer, vocab_size), positions + 1)
        cases.append((talks, hidden_states, weight, positions, out, later))
    return cases


@pytest.mark.parametrize("world_size", [1, 3, *long(2, 4, 8)])
def test_random_requests_give_the_oracles_tokens(world_size, random_cases):
    for wrong in run_ranks(world_size, _sample_random_rows, random_cases):
        assert not wrong, f"{len(wrong)} rows, first: {wrong[0]}"


def _largest_tensor(vocab_size: int, rows: int) -> int:
    """Elements of the largest tensor of building a batch, two steps and an append."""
    shard = VocabShard.even(vocab_size, dist.get_rank(), dist.get_world_size())
    rng = random.Random(5)
    talks = [Conversation.random(rng, vocab_size) for _ in range(rows)]
    for talk in talks:  # a list of ids is the request's, not state
        talk.params = replace(talk.params, allowed_token_ids=[1, 2], bad_words=[[2, 1]])
    weight = torch.zeros(len(shard), 2)
    sampler = LMHeadSampler(weight, vocab_size=vocab_size, shard=shard, backend="torch")
    with Largest() as largest:
        batch = batch_of(talks, vocab_size)
        for _ in range(2):
            out = sampler(torch.zeros(rows, 2), batch, 0)
            batch.append(out.token_ids)
    assert (
        batch.view(batch.rows).controls.tables.has_penalties
        and batch.view(batch.rows).controls.tables.has_bias
    )
    return largest.elements


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
