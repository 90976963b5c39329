"""The words of a screened step are those of the definition, bit for bit, and say so themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.screening import (
    DTYPES,
    HEADS,
    PASSES,
    Problem,
    assert_same_words,
    backends,
    problem,
    random_steps,
    requests,
    words,
)
from tests.support.tiers import long
from tpsample import SamplingBatch, SamplingParams, VocabShard


def compare(case, batch=None, *, start=0, which="fp32", num_samples=1, parts=1):
    """Compare the words of a step, and return the backend that counted what it computed."""
    v, b = case.weight.shape[0], case.hidden_states.shape[0]
    if batch is None:
        batch = SamplingBatch.from_params(requests(b), vocab_size=start + v + 3)
    definition, screened = backends(case, VocabShard(start, start + v), which)
    positions = 40 + torch.arange(b)
    arguments = (case.hidden_states, batch, positions, num_samples, parts)
    expected, stored = words(definition, *arguments)
    found, also_stored = words(screened, *arguments)
    assert_same_words(found, expected, f"{which}, shard from {start}")
    if stored is not None:
        assert torch.equal(also_stored.nan_to_num(7.0), stored.nan_to_num(7.0))
    return screened


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", HEADS)
def test_words_of_hard_heads_are_those_of_the_definition(name, dtype, which):
    for v, b, d in ((1531, 10, 128), (257, 3, 33), (130, 5, 1312), (64, 1, 7)):
        counted = compare(problem(name, v, b, d).to(dtype), which=which, start=5)
        assert (counted.candidates > 0).all()
    if name in ("normal", "zipf"):
        assert not counted.whole.any()


def test_most_ids_are_never_computed():
    counted = compare(problem("normal", 5000, 32, 64))
    assert not counted.whole.any()
    assert 32 <= counted.candidates.sum() < 12 * 32


def test_columns_far_above_the_others_leave_few_candidates():
    """As models have them: in 8 bits of one unit nothing would be left of the other columns."""
    case = problem("normal", 5000, 32, 256)
    case.hidden_states[:, ::80] *= 20
    counted = compare(case, which="int8")
    assert not counted.whole.any()
    assert 32 <= counted.candidates.sum() < 25 * 32


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 128, 131])
def test_words_of_odd_shards_are_those_of_the_definition(size, start):
    compare(problem("normal", size, 4, 16), start=start)
    compare(problem("twins", size, 4, 16), start=start, parts=3, num_samples=2)


def test_an_empty_shard_has_no_words():
    found = problem("normal", 8, 3, 16)
    case = replace(found, weight=found.weight[:0])
    counted = compare(case)
    assert counted.candidates.tolist() == counted.whole.tolist() == [0, 0, 0]


# -- requests ----------------------------------------------------------------------------------


def test_drafts_count_as_output():
    """A drafted id gains by it, so it often wins."""
    case = problem("normal", 12, 12, 16)
    params = [
        SamplingParams(seed=i, frequency_penalty=-2.0, repetition_penalty=0.9) for i in (1, 2)
    ]
    batch = SamplingBatch.from_params(params, vocab_size=15, output_token_ids=[[1, 1], [7]])
    for seed in range(5):
        drafts = torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(seed))
        compare(case, batch._with_drafts(drafts))


@pytest.mark.parametrize("which", PASSES)
def test_rows_that_store_their_logits(which):
    case = problem("normal", 500, 7, 32)
    params = requests(7)
    params[2] = replace(params[2], temperature=1.0, top_p=0.5)
    params[5] = replace(params[5], logprobs=3, repetition_penalty=1.5)
    batch = SamplingBatch.from_params(params, vocab_size=503, output_token_ids=[[1, 2, 3]] * 7)
    counted = compare(case, batch, which=which, parts=2, num_samples=2)
    assert counted.whole.tolist() == [0, 0, 500, 0, 0, 500, 0]
    plain_or_rough = torch.tensor([row != 5 for row in range(7)])
    assert ((counted.candidates > 0) == plain_or_rough).all()
    every = SamplingBatch.from_params([replace(p, logprobs=1) for p in params], vocab_size=503)
    counted = compare(case, every, which=which)
    assert counted.whole.tolist() == [500] * 7 and not counted.candidates.any()


# -- what cannot be screened -------------------------------------------------------------------


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2e30, 3e38])
@pytest.mark.parametrize("place", ["weight", "hidden_states", "bias"])
def test_numbers_that_are_not_finite_or_nearly_so(place, value, which):
    case = problem("normal", 300, 6, 24)
    case = replace(case, bias=torch.zeros(300))
    target = getattr(case, place)
    target[(4, 3) if target.ndim == 2 else 4] = value
    counted = compare(case, which=which)
    # A block of 64 ids is full in all rows, or a row in all blocks up to a NaN; of a bias none.
    row = 300 if math.isfinite(value) else 64
    of_rows = {"hidden_states": [0, 0, 0, 0, row, 0], "weight": [64] * 6, "bias": [0] * 6}
    assert counted.whole.tolist() == of_rows[place]


def test_an_empty_row_keeps_its_status():
    """All ids are forbidden: the word is that of the lowest id."""
    case = replace(problem("normal", 300, 3, 24), bias=torch.full((300,), -torch.inf))
    counted = compare(case)
    assert not counted.whole.any() and not counted.candidates.any()


def test_ties_of_every_id():
    """All rows of the weight tie, so every id is a candidate; the last one is the greedy winner.

    Behind the first block, which brings the first threshold, blocks are computed whole.
    """
    weight = torch.ones(640, 16)
    weight[639, 0] += 2e-7
    case = Problem(weight, torch.ones(2, 16))
    batch = SamplingBatch.from_params([SamplingParams(temperature=0.0)] * 2, vocab_size=640)
    for which in PASSES:
        counted = compare(case, batch, which=which)
        assert counted.candidates.tolist() == [64, 64]
        assert counted.whole.tolist() == [576, 576]


# -- many rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "first_seed"), [(3000, 0), *long((100_000, 10_000))])
def test_words_of_many_rows_are_those_of_the_definition(num_rows, first_seed):
    """Of any head, bias, requests, samples and parts."""
    for pick, case, batch, others in random_steps(num_rows, first_seed):
        compare(case, batch, which=pick.choice(PASSES), **others)
