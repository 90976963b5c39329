"""Filtered rows behind the screen's kernels: the same draws from the few logits that they store."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cases import Case, uneven_shards
from tests.support.screened_filters import (
    WAYS,
    assert_same_draws,
    filtered,
    part_of,
    shards_of,
    stored,
)
from tests.support.screening import HEADS, problem
from tests.support.tiers import long
from tests.support.virtual import assert_all_equal, step, virtual
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.local.screen_launches import Screen
from tpsample.local.triton_backend import TritonBackend
from tpsample.request.bounded_rows import row_bounds
from tpsample.screening.filter_bars import filter_bars

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"min_p": 0.3, "top_p": 0.9},
    {},
    {"top_k": 10, "top_p": 0.8, "ties": "keep"},
    {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.4},
    {"min_p": 0.2, "filter_order": "joint", "top_p": 0.7, "top_k": 50},
)


@pytest.mark.parametrize(("rows", "world_size"), [(6, 1), *long((12, 3))])
def test_filtered_rows_are_screened_too(rows, world_size):
    """Their draws are the oracle's, on one rank and on several, beside plain rows."""
    v = 700 * rows // 6
    case = Case.make(v, rows, 32)
    params = [replace(each, **FILTERS[row % len(FILTERS)]) for row, each in enumerate(case.params)]
    case = replace(case, params=params, tokens=[[row, 5, 5] for row in range(rows)])
    shards = uneven_shards(v, world_size)
    world, samplers = virtual(case, shards, None, screening="int8")
    outputs = step(world, samplers, case)
    assert_all_equal(outputs, case.oracle())
    if world_size > 1:
        assert_all_equal(step(world, samplers, case, num_samples=2), case.oracle(2))


def compare_filtered(case, batch, shards, num_samples=1) -> list[Screen]:
    """Compare the draws from the logits that the screened kernels store with those from all."""
    plain, screened = [], []
    for shard in shards:
        arguments = (*part_of(case, shard), case.head)
        batch.prepare(shard)
        plain.append(TritonBackend(*arguments, rounds=10, max_rows=64))
        screen = Screen(*arguments, rounds=10)
        screened.append(TritonBackend(*arguments, rounds=10, max_rows=64, screen=screen))
    arguments = (case.hidden_states, batch, num_samples, 1)
    found, exact = stored(screened, *arguments), stored(plain, *arguments)
    assert_same_draws(found, exact, batch, num_samples, WAYS[:1])
    return [local.screen for local in screened]


def filtered_mixtures(seeds: range) -> int:
    compared = 0
    for seed in seeds:
        pick = random.Random(seed)
        v, rows, d = pick.choice([97, 700, 1531]), pick.choice([3, 18, 20]), pick.choice([16, 33])
        name = pick.choice(sorted(set(HEADS) - {"cancelling"}))
        case = problem(name, v, rows, d, seed).to(pick.choice(DTYPES))
        if pick.random() < 0.5:  # whole numbers, so that logits tie
            whole = case.weight.round(), case.hidden_states.round()
            case = replace(case, weight=whole[0], hidden_states=whole[1])
        if pick.random() < 0.2:
            case.weight[pick.randrange(v), 0] = pick.choice([torch.nan, torch.inf])
        params = []
        for _ in range(rows):
            each = filtered(pick, repetition_penalty=pick.choice([1.0, 1.5]))
            plan = SamplingBatch.from_params([each], vocab_size=v).plan
            params.append(each if plan.bounded else SamplingParams(seed=1))
        params[0] = filtered(pick, logit_bias={3: 4.0})
        params[0] = replace(params[0], top_k=5, top_p=1.0)
        tokens = [[pick.randrange(v)] * 2 for _ in range(rows)]
        batch = SamplingBatch.from_params(params, vocab_size=v, output_token_ids=tokens)
        compare_filtered(case, batch, shards_of(v, pick), pick.choice([1, 1, 2]))
        compared += rows
    return compared


def test_few_filtered_mixtures():
    assert filtered_mixtures(range(2)) > 20


@pytest.mark.long
def test_many_filtered_mixtures():
    assert filtered_mixtures(range(1000, 1100)) > 1000


def test_the_bars_are_those_of_the_twin():
    """Rounded down to 16 bits, and never above the twin's; -inf where there are too few groups."""
    case = problem("normal", 1600, 3, 64)
    filters = {"top_k": 7}, {"min_p": 0.3}, {"top_k": 7, "min_p": 0.9}
    params = [SamplingParams(seed=1, **each) for each in filters]
    batch = SamplingBatch.from_params(params, vocab_size=1600)
    (screen,) = compare_filtered(case, batch, [VocabShard(0, 1600)])
    lower = screen.lows[:100, :3].T
    exact = (case.hidden_states @ case.weight.T).view(3, 100, 16)
    assert (lower <= exact.amax(dim=2) + 1e-4).all()
    bars = filter_bars(lower, *row_bounds(batch.plan.filters, 1600), batch.temperature)
    assert (screen.bars[:3] <= bars + 1e-6).all()
    assert (screen.bars[:3] >= bars - bars.abs() * 2.0**-7).all()

    many = SamplingBatch.from_params([SamplingParams(seed=1, top_k=200)] * 3, vocab_size=1600)
    (screen,) = compare_filtered(case, many, [VocabShard(0, 1600)])
    assert (screen.bars[:3] == -torch.inf).all()


def test_no_group_is_listed_that_cannot_be_kept():
    """Logits far apart, one in a group: as many groups as ids are kept, and not one less."""
    weight = torch.zeros(3000, 16)
    weight[::100] = torch.arange(30.0).unsqueeze(1)
    case = replace(problem("normal", 3000, 2, 16), weight=weight, hidden_states=torch.ones(2, 16))
    params = [SamplingParams(top_k=5, seed=1), SamplingParams(top_k=1, top_p=0.9, seed=2)]
    batch = SamplingBatch.from_params(params, vocab_size=3000)
    (screen,) = compare_filtered(case, batch, [VocabShard(0, 3000)])
    assert int(screen.num_listed_ptr) == 5
