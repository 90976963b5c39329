"""Kept sets wherever rows come from: a batch, fixed rounds, slots, drafts; all, one or none."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support import host_reads
from tests.support.fields import OTHER_FILTERS, one_with
from tests.support.filtered import Rows, V, grid, kinds_of_logits
from tests.support.ranks import run_ranks
from tests.support.slots import GPU
from tests.support.tiers import long
from tpsample import (
    KeptSets,
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    Status,
    reference,
    verify,
    verify_logits,
)
from tpsample.backends.torch_.cuts import Cuts
from tpsample.core.order import order_words
from tpsample.filters import kept_sets
from tpsample.speculative import reference as definition

KINDS, CAP, K = kinds_of_logits(), 60, 2
MODES = ("batch", "fixed rounds", "slots", "unknown slots", "coupled", "rejection", "block")
Found = list[tuple[int, bool, bool, list[int], list[float]]]
"""Of each row: its size, whether it is whole, whether it overflows, its ids and log-masses."""


def _rows(**options: Any) -> Rows:
    """Filtered rows, plain and greedy ones, and rows whose masks leave few ids or most."""
    others: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.5},
        {"allowed_token_ids": [7, 3, 1100]},
        {"allowed_token_ids": [7, 3, 1100], "top_k": 2},
        {"bad_words": [[9]]},
        {"top_k": 1},
    ]
    params = [SamplingParams(**({"temperature": 0.8} | each), seed=i) for i, each in
              enumerate(others)]  # fmt: skip
    kinds = [KINDS[name] for name in ("zipf", "two-valued", "spike")]
    return Rows(kinds, [*params, *grid()[::61]], **options)


FIRST_WORDS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 200},
    {"top_k": 9, "top_p": 1e-6},
    {"top_k": 40, "min_p": 0.1},
    {"top_k": 60, "top_p": 0.99, "temperature": 40.0},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 700, "top_p": 0.3, "temperature": 40.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.3, "filter_order": "min_p_last"},
    *({"top_k": 30, **each} for each in one_with(OTHER_FILTERS)),
    {"top_k": 2, "allowed_token_ids": [7, 3, 1100]},
]
"""Requests whose first words decide them."""


def _first_rows(**options: Any) -> Rows:
    """Rows that their first words decide, some of one token and some of more than the cap."""
    params = [SamplingParams(seed=seed, **each) for seed, each in enumerate(FIRST_WORDS)]
    kinds = [KINDS[name] for name in ("zipf", "all-equal", "two-valued", "spike")]
    return Rows(kinds, params, **options)


def _expected(rows: Rows) -> Found:
    batch = rows.batch
    logits = reference.processed_logits(rows.logits, batch)
    order, mask = order_words(logits).argsort(dim=1, descending=True), rows.kept_mask()
    found: Found = []
    for row, params in enumerate(rows.params):
        ids = order[row][mask[row][order[row]]]
        if params.greedy:
            ids = order[row][:1]
        masses = (logits[row, ids].double() / max(params.temperature, 1e-5)).log_softmax(0)
        whole, overflow = len(ids) == V, CAP < len(ids) < V
        listed = slice(0 if whole or overflow else None)
        found.append((len(ids), whole, overflow, ids[listed].tolist(), masses[listed].tolist()))
    return found


def _told(kept: KeptSets) -> Found:
    ends = kept.offsets.tolist()
    parts = [slice(*each) for each in itertools.pairwise(ends)]
    bits = kept.sizes.tolist(), kept.whole.tolist(), kept.overflow.tolist()
    listed = [(kept.token_ids[part].tolist(), kept.log_masses[part].tolist()) for part in parts]
    assert (kept.token_ids[ends[-1] :] == -1).all() and kept.log_masses[ends[-1] :].isnan().all()
    return [(*row, *its) for *row, its in zip(*bits, listed, strict=True)]  # type: ignore[misc]


def _slots_of(rows: Rows) -> tuple[SamplingBatch, Tensor]:
    """Return the requests in slots, in another order and beside others, and the rows' slots."""
    count = len(rows.params)
    batch = SamplingBatch.of_slots(count + 2, vocab_size=V, kept_cap=CAP)
    batch.put(list(range(count, -1, -1)), [*rows.params, SamplingParams(seed=4, top_p=0.2)])
    return batch, torch.arange(count, 0, -1)


def _emptied(found: Found, emitted: list[bool]) -> Found:
    none: Any = (0, False, False, [], [])
    return [its if drew else none for its, drew in zip(found, emitted, strict=True)]


def _step(mode: str, requests: str = "all kinds") -> tuple[Found, Found]:
    """Return what this rank finds in a mode, and what it should."""
    if mode == "fixed rounds":
        host_reads.meet_on_devices()
    rows_of = _first_rows if requests == "first words" else _rows
    rows = rows_of(kept_cap=CAP, fixed_rounds=mode == "fixed rounds")
    sampler, given, expected = rows.sampler(), rows.hidden_states, _expected(rows)
    if mode == "batch":
        return _told(sampler(given, rows.batch, rows.positions).kept), expected
    if mode == "fixed rounds":
        batch = rows.batch
        sampler(given, batch, 0)  # the first one compares hidden states
        with host_reads.refused():
            out = sampler(given, batch, rows.positions)
        assert len(out.kept.token_ids) == CAP * len(rows.params), "the size follows from the batch"
        return _told(out.kept), expected
    if mode in ("slots", "unknown slots"):
        batch, slots = _slots_of(rows)
        slots[1::4] = -1
        there = (slots >= 0).tolist()
        if mode == "slots":
            out = sampler(given, batch.select(slots), rows.positions)
        else:
            with GPU:
                out = sampler(given, batch.select(slots), rows.positions)
        return _told(out.kept), _emptied(expected, there)
    batch = rows.batch
    drawn = sampler(given, batch, rows.positions).token_ids
    drafts = torch.stack([drawn, torch.full_like(drawn, 11)], dim=1)
    states = given.unsqueeze(1).repeat(1, K + 1, 1)
    verified = verify(sampler, states, drafts, batch, rows.positions, method=mode)  # type: ignore[arg-type]
    emitted = torch.arange(K + 1) <= verified.num_accepted.unsqueeze(1)
    assert emitted.any(dim=0).sum() > 1 and not emitted.all(), "some drafts are accepted, not all"
    every = [its for its in expected for _ in range(K + 1)]
    return _told(verified.kept), _emptied(every, emitted.flatten().tolist())


@pytest.mark.parametrize("world_size", [1, 2, *long(3)])
@pytest.mark.parametrize("mode", MODES)
def test_sets_are_those_of_the_definition(mode, world_size):
    for found, expected in run_ranks(world_size, _step, mode):
        for row, (its, right) in enumerate(zip(found, expected, strict=True)):
            assert its[:4] == right[:4], f"row {row}"
            assert its[4] == pytest.approx(right[4], abs=2e-6), f"row {row}"
        assert {its[1:3] for its in found} == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("world_size", [1, 2, *long(3)])
@pytest.mark.parametrize("mode", ["batch", "fixed rounds"])
def test_sets_of_rows_that_their_first_words_decide(mode, world_size):
    """The search that other rows need is left out."""
    with patch.object(kept_sets, "find_cut", side_effect=AssertionError):
        for found, expected in run_ranks(world_size, _step, mode, "first words"):
            for row, (its, right) in enumerate(zip(found, expected, strict=True)):
                assert its[:4] == right[:4], f"row {row}"
                assert its[4] == pytest.approx(right[4], abs=2e-6), f"row {row}"
            assert {1, 2, 5, 40} < {its[0] for its in found} and any(its[2] for its in found)


def _told_of(
    requests: list[SamplingParams], rows: Rows, method: str | None, cap: int | None
) -> tuple[Any, Any, int]:
    """Return the logprobs of a call, or None, its kept sets, and how many searches it took."""
    batch = SamplingBatch.from_params(requests, vocab_size=V, kept_cap=cap)
    batch.temperature[3:5] = 0.0
    with patch.object(Cuts, "search_bins", autospec=True, side_effect=Cuts.search_bins) as bins:
        if method is None:
            out: Any = rows.sampler()(rows.hidden_states, batch, rows.positions)
        else:
            states = rows.hidden_states.unsqueeze(1).repeat(1, K, 1)
            drafts, how = rows.positions.unsqueeze(1) % V, {"method": method}
            out = verify(rows.sampler(), states, drafts, batch, rows.positions, **how)
    kept = None if out.kept is None else _told(out.kept)
    told = out.logprobs
    if told is not None:
        names = "token_ids", "values", "ranks", "entropies"
        told = [getattr(told, name).nan_to_num(7).tolist() for name in names]
    return told, kept, bins.call_count


def _together_and_alone(method: str | None) -> list[tuple[Any, ...]]:
    """Return what is told of kept sets and logprobs together, and of each alone."""
    modes = "processed_logprobs", "processed_logprobs", "raw_logprobs", "processed_logits"
    found = []
    for rows in (_rows(), _first_rows()):
        asking = [
            replace(each, logprobs=2, logprobs_mode=modes[i % 4])
            for i, each in enumerate(rows.params)
        ]
        asked = (asking, CAP), (asking, None), (rows.params, CAP)
        found.append(tuple(_told_of(its, rows, method, cap) for its, cap in asked))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", [None, "rejection"])
def test_one_search_serves_tokens_sets_and_logprobs_of_them(method, world_size):
    """Each is told alike whether or not the other was asked for, too."""
    for searched, by_first in run_ranks(world_size, _together_and_alone, method):
        for both, logprobs, kept in (searched, by_first):
            assert both[0] == logprobs[0] and both[1] == kept[1]
        assert searched[0][2] == 2, "one for top_k, one for top_p"
        assert by_first[0][2] == 0


def test_steps_that_search_for_sets_are_counted():
    for changes, searched in (({"top_p": 0.9}, 3), ({}, 0), ({"top_k": 5}, 0), ({"min_p": 0.1}, 0)):
        params = [SamplingParams(seed=seed, **changes) for seed in range(3)]
        rows = Rows([KINDS["zipf"]], params, kept_cap=CAP)
        sampler = rows.sampler()
        sampler(rows.hidden_states, rows.batch, rows.positions)
        assert sampler.counters()["second_rounds"] == searched


@pytest.mark.parametrize("mode", ["step", "rejection"])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_first_words_of_rows_without_a_token_and_of_greedy_ones(backend, mode):
    """A row with a NaN keeps nothing, and one that its temperature made greedy its argmax."""
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(3))
    logits[1, 50], logits[2] = torch.nan, -torch.inf
    params = [SamplingParams(top_k=7, top_p=0.9, seed=seed) for seed in range(4)]
    batch = SamplingBatch.from_params(params, vocab_size=600, kept_cap=CAP)
    batch.temperature[3] = 0.0
    sampler = LMHeadSampler(torch.zeros(600, 4), backend=backend, group="alone")
    if mode == "step":
        kept = sampler.sample_logits(logits, batch, 0).kept
    else:
        none = torch.empty(4, 0, dtype=torch.int64)
        kept = verify_logits(sampler, logits[:, None], none, batch, 0, method=mode).kept
    assert kept.sizes[0] > 1 and kept.sizes[1:].tolist() == [0, 0, 1]
    assert kept.token_ids[-1] == logits[3].argmax() and kept.log_masses[-1] == 0


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}])
@pytest.mark.parametrize("kept_cap", [None, CAP])
def test_processed_logprobs_of_rows_made_greedy_are_of_all_ids(fields, kept_cap):
    """Its kept set is its token all the same."""
    logits = torch.randn(2, 600, generator=torch.Generator().manual_seed(5))
    asked = {"logprobs": 3, "logprobs_mode": "processed_logprobs"}
    params = [SamplingParams(**fields, **asked, seed=seed) for seed in range(2)]
    batch = SamplingBatch.from_params(params, vocab_size=600, kept_cap=kept_cap)
    batch.temperature[1] = 0.0
    of_all = logits.double().log_softmax(dim=1)
    entropies = -(of_all.exp() * of_all).sum(dim=1)
    for backend in ("torch", "numba"):
        sampler = LMHeadSampler(torch.zeros(600, 4), backend=backend, group="alone")
        out = sampler.sample_logits(logits, batch, 0)
        found = out.logprobs
        assert found is not None
        assert torch.allclose(found.values[1], of_all[1][found.token_ids[1]], atol=5e-7, rtol=0)
        assert torch.allclose(found.entropies[1], entropies[1], atol=1e-5)
        assert found.entropies[0] < entropies[0] - 1
        if kept_cap is not None:
            assert out.kept.sizes[1] == 1 and out.kept.token_ids[-1] == logits[1].argmax()


def test_a_grammar_leaves_an_unfiltered_row_less_than_all():
    rows = Rows([KINDS["normal"]], [SamplingParams(seed=1)] * 2, kept_cap=CAP)
    batch = rows.batch
    bits = torch.full((2, -(-V // 32)), -1, dtype=torch.int32)
    bits[1] = 0
    bits[1, 2] = 0b101
    batch.grammar_bitmask = bits
    kept = rows.sampler()(rows.hidden_states, batch, rows.positions + torch.arange(2)).kept
    assert kept.whole.tolist() == [True, False] and kept.sizes.tolist() == [V, 2]
    assert sorted(kept.token_ids.tolist()) == [64, 66]


def test_a_step_without_rows_has_no_sets():
    rows = Rows([KINDS["normal"]], [SamplingParams(seed=1)], kept_cap=CAP)
    none = SamplingBatch.from_params([], vocab_size=V, kept_cap=CAP)
    assert rows.sampler()(rows.hidden_states[:0], none, 0).kept is None


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}])
def test_a_position_without_a_token_has_no_set(backend, fields):
    """The drafter's logits have a NaN, and those of the target are good."""
    batch = SamplingBatch.from_params([SamplingParams(seed=1, **fields)], vocab_size=8, kept_cap=8)
    sampler = LMHeadSampler(torch.empty(8, 0), backend=backend, on_failed=0)
    logits, draft = torch.arange(16.0).view(1, 2, 8), torch.zeros(1, 1, 8)
    draft[0, 0, 2] = torch.nan
    how: dict[str, Any] = {"method": "rejection", "draft_logits": draft}
    out = verify_logits(sampler, logits, torch.tensor([[7]]), batch, 5, **how)
    assert out.status.tolist() == [Status.NAN]
    assert out.kept.sizes.tolist() == [0, 0] and not out.kept.whole.any()


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("method", [None, "coupled", "rejection", "block"])
@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
def test_a_row_whose_scores_all_overflow_has_neither_a_token_nor_a_set(backend, method, fields):
    """The row beside it has one logit whose score is finite, and keeps as many ids as ever."""
    logits = torch.full((2, 40), -3e38)
    logits[0, 2], logits[1, 7] = -2.9e38, -1e36
    params = [SamplingParams(seed=i, temperature=0.01, **fields) for i in range(2)]
    batch = SamplingBatch.from_params(params, vocab_size=40, kept_cap=9)
    sampler = LMHeadSampler(torch.empty(40, 0), backend=backend, group="alone")
    kept = reference.kept_mask(logits, batch).sum(dim=1).tolist()
    assert kept[0] == 0 < kept[1]
    if method is None:
        out = sampler.sample_logits(logits, batch, 3)
        expected = reference.sample(logits, batch, 3)
    else:
        rows, drafts = logits.unsqueeze(1).expand(2, 2, 40), torch.tensor([[2], [7]])
        out = verify_logits(sampler, rows, drafts, batch, 3, method=method)
        expected = definition.verify(rows, drafts, batch, 3, method=method)
        kept = [each for each in kept for _ in range(2)]
    assert torch.equal(out.token_ids, expected.token_ids)
    assert out.status.tolist() == expected.status.tolist() == [Status.EMPTY, Status.OK]
    assert out.kept.sizes.tolist() == kept
    assert not out.kept.whole[0] and not out.kept.overflow[0]
