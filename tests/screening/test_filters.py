"""Rows with top_k and min_p draw the same from the logits that a screen leaves as from all."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.ranks import run_ranks
from tests.support.screened_filters import (
    WAYS,
    assert_same_draws,
    filtered,
    shards_of,
    stored,
)
from tests.support.screening import (
    PASSES,
    Problem,
    backends,
    controlled,
    problem,
    random_steps,
)
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify
from tpsample.native.store import WAITING


def compare(case, batch, *, shards=None, which="fp32", num_samples=1, parts=1, ways=WAYS):
    """Compare the draws of a step over some shards.

    Return the logits that the screens stored, and the backends that counted what they computed.
    """
    exact, screened = [], []
    for shard in shards or [VocabShard(0, len(case.weight))]:
        own = slice(shard.start, shard.stop)
        bias = None if case.bias is None else case.bias[own]
        both = backends(replace(case, weight=case.weight[own], bias=bias), shard, which)
        for made, local in zip((exact, screened), both, strict=True):
            made.append(local)
    step = (case.hidden_states, batch, num_samples, parts)
    found = stored(screened, *step)
    assert_same_draws(found, stored(exact, *step), batch, num_samples, ways)
    return found, screened


def of(params, vocab_size: int, **others) -> SamplingBatch:
    return SamplingBatch.from_params(params, vocab_size=vocab_size, **others)


@pytest.mark.parametrize(
    ("changes", "bounded"),
    [
        ({"top_k": 20}, True),
        ({"top_k": 256}, True),
        ({"top_k": 257}, False),
        ({"min_p": 0.1}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 20, "top_p": 0.9}, True),
        ({"min_p": 0.1, "top_p": 0.9}, True),
        ({"top_k": 20, "top_p": 0.9, "filter_order": "joint"}, False),
        ({"min_p": 0.1, "top_k": 20, "top_p": 0.9, "filter_order": "joint"}, True),
        ({"min_p": 0.1, "top_p": 0.9, "filter_order": "min_p_last"}, False),
        ({"min_p": 0.1, "top_k": 20, "top_p": 0.9, "filter_order": "min_p_last"}, True),
        ({"min_p": 0.1, "filter_order": "min_p_last"}, True),
        ({"top_k": 20, "logprobs": 0}, False),
    ],
    ids=str,
)
def test_which_rows_need_few_logits(changes, bounded):
    """Few of them are then computed: little more than the filter keeps."""
    case = problem("normal", 20000, 3, 48)
    batch = of([SamplingParams(seed=row, **changes) for row in range(3)], 20000)
    logits, (counted,) = compare(case, batch)
    assert bool(batch.plan.bounded) is bounded
    assert counted.whole.tolist() == [0 if bounded else 20000] * 3
    if bounded:
        there = (logits > -torch.inf).sum(dim=1)
        assert (there >= counted.candidates).all()
        assert (there >= (changes.get("top_k", 1) if not changes.get("min_p") else 1)).all()
        assert there.max() < max(300, 8 * changes.get("top_k", 0))


def test_a_kept_set_that_is_reported_takes_the_whole_way():
    batch = of([SamplingParams(top_k=5, seed=1)] * 3, 500, kept_cap=8)
    _, (counted,) = compare(problem("normal", 500, 3, 16), batch)
    assert counted.whole.tolist() == [500] * 3


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", ["weight", "hidden_states", "bias"])
def test_numbers_that_are_not_finite_or_nearly_so(place, value, which):
    case = problem("normal", 1000, 6, 24)
    case = replace(case, bias=torch.zeros(1000))
    target = getattr(case, place)
    target[(4, 3) if target.ndim == 2 else 4] = value
    params = [SamplingParams(top_k=3, min_p=0.1 * (row % 2), seed=row) for row in range(6)]
    compare(case, of(params, 1000), which=which)


def test_filters_that_keep_all_that_is_listed():
    """Descending logits so far apart that no more than k of them reach the threshold of top_k."""
    case = Problem(torch.arange(300.0, 0.0, -1.0).unsqueeze(1).repeat(1, 16), torch.ones(1, 16))
    for top_k, min_p, kept in ((5, 0.0, 5), (1, 0.0, 1), (0, 1e-14, 3), (5, 1e-14, 3)):
        params = SamplingParams(top_k=top_k, min_p=min_p, seed=1)
        logits, _ = compare(case, of([params], 300))
        assert (logits > -torch.inf).sum().item() == kept


@pytest.mark.parametrize("rows", [1, 5])
def test_more_ids_than_can_wait(rows):
    """Behind the 100 largest logits the others rise, so each is among the 200 largest so far."""
    logits = torch.arange(4.0 * WAITING)
    logits[:100] += 10_000
    case = Problem(logits.unsqueeze(1).repeat(1, 16), torch.ones(rows, 16))
    case.hidden_states[1:] = -1.0  # there they fall, and no block is stored whole
    compare(case, of([SamplingParams(top_k=200, seed=row) for row in range(rows)], len(logits)))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["near_ties", "twins", "cancelling"])
def test_logits_nearer_to_the_last_kept_than_their_bounds(name, rows):
    for seed in range(4):
        case = problem(name, 2000, rows, 48, seed=seed)
        compare(case, of([SamplingParams(top_k=20, seed=row) for row in range(rows)], 2000))


def test_the_threshold_of_min_p_is_reached():
    """Logits that lie on the threshold, or an fp32 number beside it, are there if they are kept."""
    for step in range(1, 40):
        min_p = math.exp(-step / 8)
        at = 100 + torch.tensor(min_p).double().log().float()
        near = [torch.tensor(100.0), at, at.nextafter(at + 1), at.nextafter(at - 1)]
        case = Problem(torch.stack(near).repeat(20).unsqueeze(1), torch.ones(1, 1))
        compare(case, of([SamplingParams(min_p=min_p, seed=step)], 80))


def test_ties_of_the_last_kept_are_listed():
    """All of 40 equal logits are the k-th; with ties="keep" every one of them is kept."""
    weight = torch.zeros(4000, 16)
    weight[100:4000:100] = 1.0
    case = replace(problem("normal", 4000, 2, 16), weight=weight, hidden_states=torch.ones(2, 16))
    params = [SamplingParams(top_k=3, ties=ties, seed=4) for ties in ("keep", "exact")]
    shards = [VocabShard(0, 1501), VocabShard(1501, 4000)]
    logits, _ = compare(case, of(params, 4000), shards=shards)
    assert (logits == 16.0).sum(dim=1).tolist() == [39, 39]


def test_a_row_made_greedy_by_its_temperature():
    case = problem("normal", 2000, 4, 32)
    batch = of([SamplingParams(top_k=3, min_p=0.5, seed=1)] * 4, 2000)
    batch.temperature[:2] = 0.0
    _, (counted,) = compare(case, batch)
    assert not counted.whole.any()


def test_drafts_are_screened_too():
    """`verify` by coupling repeats the rows; by ratio it needs every logit."""
    case = problem("normal", 2000, 3, 32)
    batch = of([SamplingParams(top_k=5, seed=row) for row in range(3)], 2000)
    hidden = case.hidden_states.unsqueeze(1).repeat(1, 3, 1)
    drafts = torch.randint(0, 2000, (3, 2), generator=torch.Generator().manual_seed(0))
    samplers = [LMHeadSampler(case.weight, backend=name) for name in ("numba", "torch")]
    found, expected = (verify(each, hidden, drafts, batch, 5) for each in samplers)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert batch.read(3).plan.bounded and not batch.plan.storing_every_row.bounded


def _on_ranks(rank_rows: int) -> list[list[int]]:
    """The tokens of mixed rows on these ranks, with the screen and without."""
    pick = random.Random(5)
    case = problem("normal", 3001, rank_rows, 32)
    params = [filtered(pick) for _ in range(rank_rows - 1)] + [SamplingParams(seed=1)]
    batch, found = of(params, 3001), []
    for backend in ("numba", "torch"):
        with own_sampler(case.weight, backend=backend, chunks=2) as sampler:
            steps = [sampler(case.hidden_states, batch, step).token_ids for step in range(3)]
        found.append(torch.cat(steps).tolist())
    return found


def test_ranks():
    results = run_ranks(2, _on_ranks, 10)
    assert all(result == results[0] for result in results)
    assert results[0][0] == results[0][1]


# -- many rows ---------------------------------------------------------------------------------


def mixed(rows: int, v: int, pick: random.Random) -> list[SamplingParams]:
    """Requests with filters; beside some of them, others with penalties, biases and masks."""
    params = [filtered(pick) for _ in range(rows)]
    if pick.random() < 0.3:
        others = controlled(rows, v, pick)
        params = [pick.choice(pair) for pair in zip(params, others, strict=True)]
        params[0] = filtered(pick, repetition_penalty=1.3)
    return params


@pytest.mark.parametrize(("num_rows", "first_seed"), [(1000, 0), *long((100_000, 20_000))])
def test_many_rows(num_rows, first_seed):
    """Of any head, bias, shards, samples and parts."""
    count = screened = 0
    steps = random_steps(num_rows, first_seed, (65, 300, 1531, 4000), starts=(0,), params=mixed)
    for pick, case, batch, others in steps:
        shards, ways = shards_of(len(case.weight), pick), WAYS[: pick.choice([0, 0, 1, 2])]
        how = {"which": pick.choice(PASSES), "shards": shards, "ways": ways}
        del others["start"]
        _, counted = compare(case, batch, **how, **others)
        count += len(batch.plan.filters)
        screened += int(sum(each.candidates.sum() for each in counted))
    print(count, "filtered rows, all equal;", screened, "logits computed one by one")
    assert screened > count
