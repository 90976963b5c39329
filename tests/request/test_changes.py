"""Requests that one rank alone knows, brought to the batches of all."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import own_sampler
from tests.support.random_requests import THEMES, Row, batch_of
from tests.support.ranks import same_on_ranks
from tests.support.slots import WEIGHT, D, V, sampler_of
from tpsample import Changes, SamplingBatch, SamplingParams

SLOTS, STEPS = 5, 4


def known(src: int) -> list[Row]:
    """Requests with seeds, which ranks of another number would draw otherwise."""
    pick = random.Random(src)
    rows = (Row.random(pick, V, THEMES["controls"]) for _ in range(4 * SLOTS))
    return [row for row in rows if row.seed is not None][: SLOTS + STEPS]


def _changes(step: int, rows: list[Row]) -> Changes:
    """All slots are taken at first; then in each step a request leaves and another comes."""
    changes = Changes()
    slots = range(SLOTS) if step == 0 else [step % SLOTS]
    its = rows[:SLOTS] if step == 0 else [rows[SLOTS + step]]
    changes.free(list(slots))
    changes.put(
        list(slots),
        [row.params for row in its],
        prompt_token_ids=[row.prompt for row in its],
        output_token_ids=[torch.tensor(row.output) for row in its],
    )
    return changes


def _steps(src: int) -> list[list[int]]:
    """Return what a rank draws; the others know nothing of the requests."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = own_sampler(WEIGHT, max_rows=16)
    batch, tokens = SamplingBatch.of_slots(SLOTS, vocab_size=V), []
    generator = torch.Generator().manual_seed(1)
    src = src % world_size
    rows = known(0) if rank == src else []
    for step in range(STEPS):
        sampler.broadcast(batch, _changes(step, rows) if rank == src else None, src=src)
        picked = batch.select(torch.arange(SLOTS))
        out = sampler(torch.randn(SLOTS, D, generator=generator), picked, 30 + step)
        picked.append(out.token_ids)
        tokens.append(out.token_ids.tolist())
    with pytest.raises(TypeError, match=f"changes: expected Changes on rank {src}, got NoneType"):
        sampler.broadcast(batch, src=src)
    wrong = Changes()
    wrong.put(SLOTS, SamplingParams())
    with pytest.raises(ValueError, match="put: expected rows in"):
        sampler.broadcast(batch, wrong, src=src)
    with pytest.raises(ValueError, match="src: expected an int from 0 to"):
        sampler.broadcast(batch, wrong, src=world_size)
    return tokens


@pytest.mark.parametrize("src", [0, 1])
def test_what_one_rank_knows_reaches_the_batches_of_all(src):
    found = same_on_ranks(2, _steps, src)
    assert found == same_on_ranks(1, _steps, 0)
    rows, sampler, generator = known(0), sampler_of(), torch.Generator().manual_seed(1)
    there = rows[:SLOTS]
    for step, tokens in enumerate(found):
        if step:
            there[step % SLOTS] = rows[SLOTS + step]
        batch = batch_of(there, V)
        out = sampler(torch.randn(SLOTS, D, generator=generator), batch, 30 + step)
        assert out.token_ids.tolist() == tokens
        for row, token_id in zip(there, tokens, strict=True):
            row.output.append(token_id)


def test_tokens_so_far_arrive():
    """The prompt of one request and the output of the other forbid the likeliest token."""
    changes, batch = Changes(), SamplingBatch.of_slots(2, vocab_size=V)
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
        SamplingParams(temperature=0.0, bad_words=[[7, 3]]),
    ]
    changes.put([0, 1], params, prompt_token_ids=[[3], []], output_token_ids=[[], [5, 7]])
    sampler, logits = sampler_of(), torch.zeros(2, V)
    logits[:, 3], logits[:, 4] = 9.0, 5.0
    sampler.broadcast(batch, changes)
    assert sampler.sample_logits(logits, batch, 2).token_ids.tolist() == [4, 4]


def test_rows_are_arranged_and_requests_arrive_as_they_were():
    changes, batch = Changes(), SamplingBatch.from_params([], vocab_size=V, max_rows=4)
    rich = SamplingParams(
        seed=2**64 - 1, logit_bias={3: -1.5, 60: 2.0}, bad_words=[[1, 2]], logprobs=2, top_p=0.1,
        allowed_token_ids=[1, 2, 3], min_tokens=2, stop_token_ids=[2], temperature=0.30000001,
        top_k=-1, min_p=0.5, ties="keep", logprob_token_ids=[],
    )  # fmt: skip
    changes.arrange([1, 0], [SamplingParams(), rich], prompt_token_ids=[[1], [2]])
    changes.arrange([0])
    assert len(changes) == 2
    sampler_of().broadcast(batch, changes)
    assert batch.requests == (rich,)
