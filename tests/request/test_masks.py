"""Masks of a batch: assigned, taken away, stale after rows have changed; and ids held back."""

import pytest
import torch

from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support.rows import bitmask_of
from tests.support.small_heads import V, head
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
)


@pytest.mark.parametrize(("backend", "shards"), [("torch", 1), ("triton", 1), ("triton", 3)])
def test_min_tokens_empties_no_row(backend, shards):
    """Where the grammar and the allowed ids leave stop ids alone, those may be drawn."""
    stop = {"min_tokens": 5, "stop_token_ids": [28, 2, 2]}
    params = [
        SamplingParams(seed=0, **stop),
        SamplingParams(seed=1, **stop, allowed_token_ids=[2, 28]),
        SamplingParams(seed=2, **stop, allowed_token_ids=[2, 3]),
        SamplingParams(seed=3, **stop, allowed_token_ids=[2, 3]),
        SamplingParams(seed=4, **stop),
        SamplingParams(seed=5, **stop),
    ]
    grammar = [None, None, None, {1, 2}, {28}, {28, 30}]  # 30 is behind the vocabulary
    allowed = [set(range(V)) - {2, 28}, {2, 28}, {3}, {2}, {28}, {28}]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    batch.grammar_bitmask = bitmask_of(grammar, 32)
    logits = torch.zeros(6, V)
    processed = reference.processed_logits(logits, batch)
    assert [set((row == 0).nonzero().flatten().tolist()) for row in processed] == allowed
    hidden_states, weight = head(6)
    tokens = reference.sample(reference.logits(hidden_states, weight), batch, 1).token_ids
    world = VirtualWorld([VocabShard.even(V, rank, shards) for rank in range(shards)])
    samplers = [
        LMHeadSampler(weight[s.start : s.stop], group=ranks, backend=backend)
        for s, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, hidden_states, batch, 1):
        assert torch.equal(out.token_ids, tokens)
    for _ in range(5):
        batch.append(torch.zeros(6, dtype=torch.int64))
    batch.grammar_bitmask = None
    assert (reference.processed_logits(logits, batch)[0] == 0).all()


@pytest.mark.parametrize(("backend", "shards"), [("torch", 1), ("triton", 3), ("numba", 1)])
def test_a_forced_id_that_is_none_leaves_no_id(backend, shards):
    """As -100 is, by which trainers mark what does not count: it does not mean any id.

    Nor do other masks of the row count: of a stop id, and of a bad word.
    """
    others = {"bad_words": [[1]], "min_tokens": 3, "stop_token_ids": [5]}
    params = [SamplingParams(seed=row, **others) for row in range(7)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    batch.forced_token_ids = torch.tensor([-2, -100, -(2**40), V, 2**40, 5, 1])
    hidden_states, weight = head(7)
    expected = reference.sample(reference.logits(hidden_states, weight), batch, 1)
    assert expected.status.tolist() == [Status.EMPTY] * 5 + [Status.OK] * 2
    world = VirtualWorld([VocabShard.even(V, rank, shards) for rank in range(shards)])
    samplers = [
        LMHeadSampler(weight[s.start : s.stop], group=ranks, backend=backend)
        for s, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, hidden_states, batch, 1):
        assert out.token_ids.tolist() == [-1] * 5 + [5, 1]
        assert torch.equal(out.status, expected.status)


def test_min_tokens_over_the_whole_vocabulary_hold_back_nothing():
    params = SamplingParams(seed=1, min_tokens=3, stop_token_ids=list(range(V)))
    batch = SamplingBatch.from_params([params], vocab_size=V)
    assert (reference.processed_logits(torch.zeros(1, V), batch) == 0).all()
