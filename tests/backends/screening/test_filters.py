"""Rows with top_k and min_p draw the same from the logits that a screen leaves as from all."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.native import number_near_largest
from tests.support.screening import (
    PASSES,
    Problem,
    backends,
    controlled,
    problem,
    random_steps,
    words,
)
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, verify
from tpsample.backends.numba_.kernels.store import WAITING
from tpsample.backends.numba_.row_kinds import kinds_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core import word
from tpsample.core.row_noise import RowNoise, safe_temperature
from tpsample.filters.sample import sample_filtered
from tpsample.ranks.process import ranks_of
from tpsample.reference import kept_rows
from tpsample.request.step import raw_and_processed


def sample_in_fixed_rounds(*arguments: Any) -> Tensor:
    """Sample while the host reads nothing."""
    return sample_filtered(*arguments, may_read=False)


PROCESSED = {"logprobs_mode": "processed_logprobs"}
WAYS = (sample_filtered, sample_in_fixed_rounds)


def assert_same_draws(
    few: Tensor, every: Tensor, batch: SamplingBatch, num_samples: int, ways: Sequence[Any]
) -> None:
    """The kept sets and the words of filtered rows are the same, by some of WAYS.

    A logit that is there is exact, and one that is not is that of no kept token.
    """
    plan, rows = batch.plan, len(batch.plan.requests)
    assert plan.filters is not None
    there = few > -torch.inf
    same = (few == every) | (few.isnan() & every.isnan())
    assert (same | ~(there | few.isnan())).all(), "a stored logit is not exact"
    view, filters = batch._view_of(rows), plan.filters
    temperature, is_random = safe_temperature(batch.temperature[filters.row_index])
    first = len(plan.stored_list) if len(every) > len(plan.stored_list) else 0
    of_filters = slice(first, first + len(filters))
    kept = kept_rows(every[of_filters], temperature, filters) & is_random.unsqueeze(1)
    also = kept_rows(few[of_filters], temperature, filters) & is_random.unsqueeze(1)
    wrong = (kept != also).any(dim=1).nonzero().squeeze(1).tolist()
    assert not wrong, f"kept sets of filtered rows {wrong} differ"

    noise = RowNoise(batch.temperature, batch.seed, 40 + torch.arange(rows), num_samples)
    for sample in ways:
        expected, found = (
            sample(
                ShardLogits.of(logits, view, noise).select(slice(0, len(filters))),
                filters,
                ranks_of("alone"),
            )
            for logits in (every, few)
        )
        wrong = (expected != found).any(dim=1).nonzero().squeeze(1).tolist()
        assert not wrong, f"{sample.__name__}: words of filtered rows {wrong} differ"


def shards_of(vocab_size: int, pick: random.Random) -> list[VocabShard]:
    """One to three shards of very different sizes."""
    cuts = sorted(pick.randrange(vocab_size + 1) for _ in range(pick.randrange(3)))
    bounds = [0, *cuts, vocab_size]
    return [VocabShard(a, b) for a, b in pairwise(bounds)]


def filtered(pick: random.Random, **others: object) -> SamplingParams:
    """A request with filters; a bound can serve most."""
    top_k, min_p = pick.choice(
        [(0, 0.2), (1, 0.0), (3, 0.0), (7, 0.05), (20, 0.9), (40, 0.0), (90, 0.0), (300, 0.01)]
    )
    return SamplingParams(
        temperature=pick.choice([0.1, 0.7, 1.0, 2.5]),
        top_k=top_k,
        top_p=pick.choice([1.0, 0.9, 0.5]),
        min_p=min_p,
        ties=pick.choice(["exact", "keep"]),
        filter_order=pick.choice(["sequential", "joint", "min_p_last"]),
        seed=pick.randrange(2**40),
        **others,  # type: ignore[arg-type]
    )


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
    positions = 40 + torch.arange(len(case.hidden_states))
    step = (case.hidden_states, batch, positions, num_samples, parts)
    few, every = (
        torch.cat([words(local, *step)[1] for local in locals_], dim=1)
        for locals_ in (screened, exact)
    )
    assert_same_draws(few, every, batch, num_samples, ways)
    return few, screened


def of(params, vocab_size: int, **others) -> SamplingBatch:
    return SamplingBatch.from_params(params, vocab_size=vocab_size, **others)


@pytest.mark.parametrize(
    ("changes", "bounded"),
    [
        ({"top_k": 20}, True),
        ({"top_k": 256}, True),
        ({"top_k": 257}, True),
        ({"min_p": 0.1}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 20, "top_p": 0.9}, True),
        ({"min_p": 0.1, "top_p": 0.9}, True),
        ({"top_k": 20, "top_p": 0.9, "filter_order": "joint"}, False),
        ({"min_p": 0.1, "top_k": 20, "top_p": 0.9, "filter_order": "joint"}, True),
        ({"min_p": 0.1, "top_p": 0.9, "filter_order": "min_p_last"}, False),
        ({"min_p": 0.1, "top_k": 20, "top_p": 0.9, "filter_order": "min_p_last"}, True),
        ({"min_p": 0.1, "filter_order": "min_p_last"}, True),
        ({"top_k": 257, "top_p": 0.9}, True),
        ({"top_k": 1024, "top_p": 0.9, "ties": "keep"}, True),
        ({"top_k": 1025, "top_p": 0.9}, True),
        ({"top_k": 20, "logprobs": 0}, False),
        ({"top_k": 20, "logprobs": 5, **PROCESSED}, True),
        ({"top_k": 5, "logprobs": 20, **PROCESSED}, True),
        ({"top_k": 20, "logprobs": 257, **PROCESSED}, False),
        ({"top_k": 20, "logprob_token_ids": [7], **PROCESSED}, False),
        ({"min_p": 0.1, "logprobs": 0, **PROCESSED}, True),
        ({"min_p": 0.1, "logprobs": 1, **PROCESSED}, False),
    ],
    ids=str,
)
def test_which_rows_need_few_logits(changes, bounded):
    """Few of them are then computed: little more than the filter keeps.

    Of a min_p, and of a top_k over 256, they are listed where kept sets or logprobs are told. Among
    the first blocks are some most of whose ids reach the threshold so far: these are computed
    whole.
    """
    case = problem("normal", 20000, 3, 48)
    told = "logprobs" not in changes and ("min_p" in changes or changes == {"top_k": 257})
    of_sets = {"kept_cap": 8} if told else {}
    batch = of([SamplingParams(seed=row, **changes) for row in range(3)], 20000, **of_sets)
    logits, (counted,) = compare(case, batch)
    assert bool(kinds_of(batch.plan).bounded) is bounded
    others = counted.whole - (0 if bounded else 20000)
    assert ((others >= 0) & (others <= 2 * 64)).all()
    if bounded:
        there = (logits > -torch.inf).sum(dim=1)
        assert (there >= counted.candidates).all()
        assert (there >= (changes.get("top_k", 1) if not changes.get("min_p") else 1)).all()
        assert there.max() < max(300, 8 * changes.get("top_k", 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_k": 200},
        {"top_k": 500, "top_p": 0.9},
        {"top_k": 2000},
        {"min_p": 0.1},
        {"min_p": 0.1, "logprobs": 0, **PROCESSED},
    ],
    ids=str,
)
def test_a_row_with_a_nan_computes_few_logits(changes):
    """Nothing comes before the first of them, so that a broken row takes no time from others."""
    case = problem("normal", 20000, 3, 48)
    case.hidden_states[1, 5] = torch.nan
    batch = of([SamplingParams(seed=row, **changes) for row in range(3)], 20000)
    _, native = backends(case, VocabShard(0, 20000))
    step = native.prepare(case.hidden_states, batch._view_of(3), torch.arange(3), 1)
    words = torch.zeros(3, dtype=torch.int64)
    native.best_words(step, words)
    assert 0 < native.candidates[1] + native.whole[1] < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 50},
        {"top_k": 200},
        {"top_k": 2000},
        {"top_k": 1000, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.9, "filter_order": "joint"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "biased"), [(1, True), (4, False)])
def test_flat_rows_compute_whole_blocks(changes, rows, biased):
    """Every logit may be the largest, and yet few are computed one by one."""
    case = problem("normal", 6400, rows, 48).to(torch.bfloat16)
    case = replace(case, weight=case.weight[:1].repeat(6400, 1))
    if biased:
        case = replace(case, bias=torch.arange(6400) * 1e-9)
    batch = of([SamplingParams(seed=row, **changes) for row in range(rows)], 6400)
    _, (counted,) = compare(case, batch)
    assert (counted.candidates <= 2 * WAITING).all() and (counted.whole >= 5000).all()
    samplers = [LMHeadSampler(case.weight, bias=case.bias, backend=b) for b in ("numba", "torch")]
    found, expected = (each(case.hidden_states, batch, 0).token_ids for each in samplers)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_logits_of_the_best_scores_of_flat_rows_are_stored(changes):
    case = problem("normal", 2000, 3, 48)
    case = replace(case, weight=case.weight[:1].repeat(2000, 1))
    batch = of([SamplingParams(seed=row, **changes) for row in range(3)], 2000)
    steps = []
    for local in backends(case, VocabShard(0, 2000)):
        steps.append(local.prepare(case.hidden_states, batch._view_of(3), torch.arange(3), 1))
        steps[-1].logits.fill_(torch.nan)
        local.best_words(steps[-1], torch.zeros(3, dtype=torch.int64))
    best = word.token_of(steps[1].found.best[0]).flatten(1)
    expected, found = (step.logits.gather(1, best) for step in steps)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"logprobs": 3}], ids=str)
def test_a_plain_row_stores_its_logits_before_and_after_controls(filters):
    """The tables that a neighbour needs have nothing of this row."""
    case = problem("normal", 500, 2, 16).to(torch.bfloat16)  # whose sums in float64 are exact
    neighbour = SamplingParams(seed=1, frequency_penalty=1.0, logit_bias={3: 2.0}, **filters)
    batch = of([SamplingParams(seed=0, **filters), neighbour], 500)
    _, native = backends(case, VocabShard(0, 500))
    step = native.prepare(case.hidden_states, batch._view_of(2), torch.arange(2), 1)
    native.best_words(step, torch.zeros(2, dtype=torch.int64))
    raw, processed = raw_and_processed(step.logits, 2)
    assert (raw[0] > -torch.inf).sum() >= 5
    assert torch.equal(raw[0], processed[0])
    assert not torch.equal(raw[1], processed[1])


@pytest.mark.parametrize(("changes", "whole"), [({"top_k": 5}, 0), ({"top_p": 0.9}, 500)])
def test_a_kept_set_that_is_reported_needs_what_its_row_weighs(changes, whole):
    batch = of([SamplingParams(seed=1, **changes)] * 3, 500, kept_cap=8)
    _, (counted,) = compare(problem("normal", 500, 3, 16), batch)
    assert counted.whole.tolist() == [whole] * 3


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
    compare(case, of([replace(each, top_k=70) for each in params], 1000), which=which)


def test_filters_that_keep_all_that_is_listed():
    """Descending logits so far apart that no more than k of them reach the threshold of top_k.

    Without top_k all of the first block reach what is known by then, so it is stored whole.
    """
    case = Problem(torch.arange(300.0, 0.0, -1.0).unsqueeze(1).repeat(1, 16), torch.ones(1, 16))
    for top_k, min_p, kept in ((5, 0.0, 5), (1, 0.0, 1), (0, 1e-14, 64), (5, 1e-14, 3)):
        params = SamplingParams(top_k=top_k, min_p=min_p, seed=1)
        logits, _ = compare(case, of([params], 300))
        assert (logits > -torch.inf).sum().item() == kept


@pytest.mark.parametrize("rows", [1, 5])
def test_more_ids_than_can_wait(rows):
    """Behind the 30 largest logits the others rise, so each is among the 60 largest so far."""
    logits = torch.arange(4.0 * WAITING)
    logits[:30] += 10_000
    case = Problem(logits.unsqueeze(1).repeat(1, 16), torch.ones(rows, 16))
    case.hidden_states[1:] = -1.0  # there they fall, and no block is stored whole
    compare(case, of([SamplingParams(top_k=60, seed=row) for row in range(rows)], len(logits)))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["near_ties", "twins", "cancelling"])
@pytest.mark.parametrize("top_k", [20, 80])
def test_logits_nearer_to_the_last_kept_than_their_bounds(name, rows, top_k):
    for seed in range(4):
        case = problem(name, 2000, rows, 48, seed=seed)
        params = [SamplingParams(top_k=top_k, seed=row) for row in range(rows)]
        compare(case, of(params, 2000))


@pytest.mark.parametrize("count", [1, 2, 100, 1000, 1001])
def test_a_number_that_the_largest_reach(count):
    """At least as many reach it as are asked for, and hardly more; a NaN is the largest."""
    pick = torch.Generator().manual_seed(count)
    for spread in (1e-3, 1.0, 1e30):
        ends = torch.randn(1000, generator=pick) * spread
        ends[::50] = -torch.inf
        for nans in (0, 3):
            ends[7 : 7 + nans] = torch.nan
            found = number_near_largest(ends.numpy(), count)
            reaching = int((~(ends < found)).sum())
            if count <= nans or count > 980:
                assert not found > -math.inf or found != found
                continue
            assert count <= reaching
            last = ends.nan_to_num(math.inf, neginf=-math.inf).sort(descending=True).values
            assert last[count - 1] - found <= 2.0**-12 * abs(last[count - 1])


@pytest.mark.parametrize("logprobs", [0, 3, 9])
def test_logprobs_of_a_row_made_greedy_by_its_temperature_are_of_all_ids(logprobs):
    """The others' are of five ids, and list as many as were asked for."""
    case = problem("normal", 2000, 3, 32)
    batch = of([SamplingParams(top_k=5, seed=1, logprobs=logprobs, **PROCESSED)] * 3, 2000)
    batch.temperature[1] = 0.0
    samplers = [LMHeadSampler(case.weight, backend=name) for name in ("numba", "torch")]
    found, expected = (each(case.hidden_states, batch, 0).logprobs for each in samplers)
    for name in ("token_ids", "values", "ranks", "entropies"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.entropies[1] > found.entropies[0] + 1).all()


def test_no_more_is_computed_than_top_k_asks_for():
    """Falling logits so far apart that no other one reaches the upper end of the k-th."""
    falling = torch.arange(1000.0, 0.0, -1.0).unsqueeze(1).repeat(1, 16)
    for top_k in (65, 100):
        case = Problem(falling, torch.ones(2, 16))
        _, (counted,) = compare(case, of([SamplingParams(top_k=top_k, seed=1)] * 2, 1000))
        assert (counted.candidates + counted.whole).tolist() == [top_k] * 2


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
    assert kinds_of(batch._read(3).plan).bounded
    assert not kinds_of(batch.plan.storing_every_row).bounded


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
def test_screened_rows_with_filters_draw_as_from_all_logits(num_rows, first_seed):
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
