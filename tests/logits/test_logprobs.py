"""Logprobs on gloo ranks: float64 log-softmax, exact ranks, the same bits on every rank."""

import math
from typing import Any

import pytest
import torch

from tests.support.filtered import (
    Rows,
    assert_same,
    assert_same_logprobs,
    kinds_of_logits,
    masked,
    steps,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import SamplingParams

SIZES = [[1, 3], *long([1, 2, 8])]
KINDS = kinds_of_logits()
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def _requests() -> list[SamplingParams]:
    """Every mode with and without filters, greedy rows, and rows that ask for nothing."""
    params = [SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.8), SamplingParams(seed=3)]
    for mode in MODES:
        for i, changes in enumerate(
            (
                {}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3, "ties": "keep"},
                {"top_k": 3}, {"temperature": 0.0, "top_k": 4}, {"min_p": 0.3, "temperature": 2.0},
                {"top_k": 30, "top_p": 0.6, "filter_order": "joint"},
                {"top_p": 0.6, "min_p": 0.2, "ties": "keep", "filter_order": "min_p_last"},
            )
        ):  # fmt: skip
            chosen = [[5, 1199, 0], None, [701]][i % 3]
            params.append(
                SamplingParams(
                    seed=i, logprobs=(4, 0, 7)[i % 3], logprobs_mode=mode,
                    logprob_token_ids=chosen, **changes,
                )
            )  # fmt: skip
    return params


def _cases() -> list[Rows]:
    return [
        Rows([KINDS[name] for name in ("zipf", "two-valued", "all-equal", "wide")], _requests()),
        Rows([KINDS["normal"]], _requests(), bias=masked(30, 1100)),
    ]


@pytest.mark.parametrize("world_sizes", SIZES, ids=str)
@pytest.mark.parametrize("num_samples", [None, 3])
def test_values_ids_and_ranks_are_the_oracles_and_the_same_everywhere(num_samples, world_sizes):
    cases, first = _cases(), None
    expected = [rows.oracle(num_samples) for rows in cases]
    for world_size in world_sizes:
        for outputs in run_ranks(world_size, steps, cases, num_samples):
            first = first or outputs
            for out, oracle, same in zip(outputs, expected, first, strict=True):
                assert_same(out, oracle)
                assert_same_logprobs(out.logprobs, same.logprobs, tolerance=0)
                assert out.logprobs.entropies.isfinite().any()


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
    entropy = -sum(p * math.log(p) for p in (0.1, 0.2, 0.4, 0.2, 0.1))
    assert got.entropies.item() == pytest.approx(entropy, abs=1e-7)


def test_a_rank_counts_no_tie_that_was_cut_away():
    changes = {"top_k": 3, "logprobs": 6, "logprobs_mode": "processed_logits"}
    got = _one([3.0, 4.0, 4.0, 5.0, 4.0, 1.0], **changes)
    assert got.token_ids[0, 1:].tolist() == [3, 1, 2, 4, 0, 5]
    assert got.ranks[0, 1:].tolist() == [1, 3, 3, 6, 6, 6]
    got = _one([3.0, 4.0, 4.0, 5.0, 4.0, 1.0], **changes, ties="keep")
    assert got.ranks[0, 1:].tolist() == [1, 4, 4, 4, 6, 6]


def test_rows_that_are_all_stored_in_another_order_keep_their_own_tokens_and_logprobs():
    """The filtered row comes first among the stored ones."""
    params = [
        SamplingParams(seed=1, temperature=0.5, logprobs=2, logprobs_mode="processed_logprobs"),
        SamplingParams(seed=2, temperature=2.0, top_k=900),
    ]
    rows = Rows([KINDS["normal"]], params)
    assert_same(rows.step(), rows.oracle())


def test_a_spike_over_a_long_tail_is_within_tolerance():
    """Masses round the tail most where one token holds nearly everything."""
    logits = torch.full((2**17,), -27.4)
    logits[99] = 0.0
    rows = Rows([logits], [SamplingParams(seed=0, logprobs=1, logprob_token_ids=[7])])
    got = rows.step().logprobs
    exact = logits.double().log_softmax(0)[got.token_ids[0]]
    assert (got.values[0] - exact).abs().max() < 2e-6
