"""Logprobs that can be worked out by hand; `tests.sampler` compares those of random rows."""

import math
from typing import Any, get_args

import pytest
import torch

from benchmarks.lab import calls
from tests.support.filtered import Rows, assert_same, kinds_of_logits
from tests.support.slots import GPU
from tests.support.tiers import thinned
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, Status
from tpsample.request.params import LogprobsMode

INF, NAN = math.inf, math.nan
KINDS = kinds_of_logits()


def _one(logits: list[float], **changes) -> Any:
    rows = Rows([torch.tensor(logits)], [SamplingParams(seed=3, **changes)])
    return rows.step().logprobs


def test_the_layout_by_hand():
    """Sampled token, then the top 3, then the chosen ids; ties by id, their ranks together."""
    logits = [math.log(p) for p in (0.1, 0.2, 0.4, 0.2, 0.1)]
    got = _one(logits, temperature=0.0, logprobs=3, logprob_token_ids=[4, 0])
    assert got.token_ids.tolist() == [[2, 2, 1, 3, 4, 0]]
    assert got.ranks.tolist() == [[1, 1, 3, 3, 5, 5]]
    probabilities = [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    assert got.values.exp()[0].tolist() == pytest.approx(probabilities, abs=1e-7)
    assert _one(logits, temperature=0.0, logprobs=2).ranks.tolist() == [[1, 1, 3]]
    entropy = -sum(p * math.log(p) for p in (0.1, 0.2, 0.4, 0.2, 0.1))
    assert got.entropies.item() == pytest.approx(entropy, abs=1e-7)


def test_a_rank_counts_no_tie_that_was_cut_away():
    """Neither among the most likely tokens, nor where it is asked for by its id."""
    changes = {"top_k": 3, "logprobs": 6, "logprobs_mode": "processed_logits"}
    changes["logprob_token_ids"] = [1]
    got = _one([3.0, 4.0, 4.0, 5.0, 4.0, 1.0], **changes)
    assert got.token_ids[0, 1:].tolist() == [3, 1, 2, 4, 0, 5, 1]
    assert got.ranks[0, 1:].tolist() == [1, 3, 3, 6, 6, 6, 3]
    got = _one([3.0, 4.0, 4.0, 5.0, 4.0, 1.0], **changes, ties="keep")
    assert got.ranks[0, 1:].tolist() == [1, 4, 4, 4, 6, 6, 4]


def test_rows_that_are_all_stored_in_another_order_keep_their_own_tokens_and_logprobs():
    """The filtered row comes first among the stored ones."""
    params = [
        SamplingParams(seed=1, temperature=0.5, logprobs=2, logprobs_mode="processed_logprobs"),
        SamplingParams(seed=2, temperature=2.0, top_k=900),
    ]
    rows = Rows([KINDS["normal"]], params)
    assert_same(rows.step(), rows.oracle())


AMONG_FIRST: list[tuple[dict[str, Any], int]] = [
    ({"logprobs": 3}, 1),
    ({"logprobs": 3, "logprobs_mode": "processed_logprobs"}, 1),
    ({"logprobs": 5, "top_p": 0.6}, 1),
    ({"logprobs": 6}, 2),
    ({"logprobs": 3, "logprob_token_ids": [7]}, 2),
    ({"logprobs": 3, "presence_penalty": 2.0}, 2),
]
"""Fields beside a top_k of 5, and how many exchanges gather words of tokens."""


@pytest.mark.parametrize(
    ("backend", "among_first", "num_samples"),
    thinned(["torch", "numba", "triton"], AMONG_FIRST, [None, 2], one_in=2),
)
def test_words_that_decided_the_rows_serve_their_logprobs(backend, among_first, num_samples):
    """Unless more tokens are asked for, or other logits: a NaN and a masked row have none."""
    fields, gathers = among_first
    nan, nothing = torch.zeros(1200), torch.full((1200,), -math.inf)
    nan[5] = math.nan
    kinds = [KINDS["normal"], KINDS["all-equal"], nan, nothing]
    params = [SamplingParams(top_k=5, seed=seed, **fields) for seed in range(2)]
    rows = Rows(kinds, params, prompt_token_ids=[[1]] * 8, output_token_ids=[[2, 40]] * 8)
    sampler = rows.sampler(backend=backend)
    given = rows.logits, rows.batch, rows.positions
    with calls.exchanges() as taken:
        found = sampler.sample_logits(*given, num_samples=num_samples, head_applied=True)
    assert_same(found, rows.oracle(num_samples))
    assert [kind for kind, _ in taken].count("gather") == gathers


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("order", ["sequential", "joint"])
@pytest.mark.parametrize("kept_cap", [None, 50])
def test_a_row_without_filters_has_logprobs_of_its_own(backend, order, kept_cap):
    """Filtered rows stand among others that ask, and some of them do not."""
    asks, both = {"logprobs": 2}, {"top_p": 0.9, "filter_order": order}
    fields = [{"top_k": 5, **both, **asks}, asks, {"top_k": 4, **both}, {"top_k": 3, **asks}]
    params = [SamplingParams(seed=seed, **its) for seed, its in enumerate(fields)]
    for chosen in (params, [params[0], params[2]], [params[2], params[3]], [params[0], params[3]]):
        rows = Rows([KINDS["normal"]], chosen, kept_cap=kept_cap)
        assert_same(rows.step(backend=backend), rows.oracle())


def test_a_slot_that_does_not_ask_reports_nothing_where_the_host_knows_no_slot():
    params = [SamplingParams(seed=1, top_k=5, logprobs=2), SamplingParams(seed=2, top_k=4)]
    slots = SamplingBatch.of_slots(2, vocab_size=1200)
    slots.put([0, 1], params)
    rows = Rows([KINDS["normal"]], params)
    sampler, chosen = rows.sampler(backend="triton"), torch.arange(2)
    given = rows.logits, rows.positions
    known = sampler.sample_logits(given[0], slots.select(chosen, host=[0, 1]), given[1])
    with GPU:
        found = sampler.sample_logits(given[0], slots.select(chosen), given[1])
    assert torch.equal(found.token_ids, known.token_ids) and found.logprobs.values[1].isnan().all()
    for name in ("token_ids", "ranks", "values"):
        of_both = getattr(found.logprobs, name)[0], getattr(known.logprobs, name)[0]
        assert torch.equal(*of_both)
    assert (found.logprobs.token_ids[1] == -1).all() and (found.logprobs.ranks[1] == 0).all()


@pytest.mark.parametrize(
    ("backend", "fields", "mode"),
    thinned(
        ["torch", "numba", "triton"],
        [{}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0.0}],
        get_args(LogprobsMode),
        one_in=2,
    ),
)
def test_a_logit_that_is_no_number_counts_where_no_mask_has_removed_it(backend, fields, mode):
    """A raw row with a NaN has no distribution, whatever was drawn, and +inf has all of another."""
    kinds = [KINDS["normal"].clone() for _ in range(4)]
    kinds[0][3], kinds[1][3], kinds[2][7], kinds[3][[3, 7, 8]] = NAN, INF, INF, INF
    asked = {"logprobs": 2, "logprobs_mode": mode, "logprob_token_ids": [3, 7]}
    params = [SamplingParams(seed=1, allowed_token_ids=[5, 7, 8], **asked, **fields)]
    rows = Rows(kinds, params)
    expected = rows.oracle(2)
    out = rows.sampler(backend=backend).sample_logits(
        rows.logits, rows.batch, rows.positions, num_samples=2
    )
    assert out.status.tolist() == [Status.OK] * 4
    assert_same(out, expected)
    has_none = mode.startswith("raw")
    assert bool((expected.logprobs.token_ids[0] == -1).all()) == has_none
    assert bool(expected.logprobs.entropies[0].isnan()) == has_none
    assert not expected.logprobs.values[1:].isnan().any()


def test_a_spike_over_a_long_tail_is_within_tolerance():
    """Masses round the tail most where one token holds nearly everything."""
    logits = torch.full((2**17,), -27.4)
    logits[99] = 0.0
    rows = Rows([logits], [SamplingParams(seed=0, logprobs=1, logprob_token_ids=[7])])
    got = rows.step().logprobs
    exact = logits.double().log_softmax(0)[got.token_ids[0]]
    assert (got.values[0] - exact).abs().max() < 2e-6


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_masked_tokens_follow_where_a_head_leaves_fewer_than_are_asked_for(backend, mode):
    """They have the least ids, and no row reports an id outside of the vocabulary."""
    bias = torch.full((130,), -INF)
    bias[[7, 70, 128]] = 0.5
    params = [
        SamplingParams(seed=1, top_k=top_k, logprobs=5, logprobs_mode=mode) for top_k in (2, 3, 20)
    ]
    sampler = LMHeadSampler(torch.ones(130, 4), bias=bias, backend=backend)
    batch = SamplingBatch.from_params(params, vocab_size=130)
    logprobs = sampler(torch.ones(3, 4), batch, 0).logprobs
    assert logprobs is not None
    assert logprobs.token_ids[:, 1:].tolist() == [[7, 70, 128, 0, 1]] * 3
