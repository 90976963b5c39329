"""Slots that the host has as well: a step does what these requests need, and no more."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.lab import calls
from tests.request.test_slots import graph_rows
from tests.support.cases import own_sampler
from tests.support.ranks import run_ranks
from tests.support.rows import so_far_of
from tests.support.slots import GPU, D, V, sampler_of
from tpsample import SamplingBatch, SamplingParams, verify


def _eight_slots(**of_slot_3: Any) -> SamplingBatch:
    batch = SamplingBatch.of_slots(8, vocab_size=V)
    others: list[dict[str, Any]] = [{}] * 3 + [of_slot_3] + [{}] * 4
    batch.put(range(8), [SamplingParams(seed=i, **each) for i, each in enumerate(others)])
    return batch


def _sent(known: bool) -> tuple[list[str], int, list[int]]:
    """Return what a step over eight slots, one with top_p, exchanges beside its words."""
    sampler = own_sampler(torch.randn(V, D, generator=torch.Generator().manual_seed(2)))
    batch, slots, ranks = _eight_slots(top_p=0.9), torch.arange(8), sampler.ranks
    hidden = torch.randn(8, D, generator=torch.Generator().manual_seed(3))
    expected = sampler(hidden, batch.select(slots), 0).token_ids
    before = ranks.bytes_sent
    with GPU, calls.exchanges() as taken:
        rows = batch.select(slots, host=range(8) if known else None)
        assert sampler(hidden, rows, 0).token_ids.tolist() == expected.tolist()
        sent, stored = ranks.bytes_sent - before, rows._view_of(8).plan.stored_list
    return [kind for kind, _ in taken], sent, stored


def test_one_filtered_slot_of_eight_costs_what_one_filtered_row_costs():
    """Its best words travel with the step's, and one sum decides it."""
    few, other = run_ranks(2, _sent, True)
    assert few == other == (["sum"], 272, [3])
    all_made, all_sent, all_stored = run_ranks(2, _sent, False)[0]
    assert (all_made.count("sum"), all_sent) == (4, 67_840)
    assert all_stored == list(range(8))


CHOSEN = [[3, -1, 0, 6, 4], [6, 5, 1, -1, 99], [1, 2, 3, 2, 7], [0, 4, 8, 6, -5], [-1] * 5]
"""Slots of requests, padding, slots that are not there, empty ones, and one that is named twice."""


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_step_is_the_same_whether_the_host_knows_its_slots_or_reads_them(chosen, kind):
    batch, sampler = SamplingBatch.of_slots(9, vocab_size=V), sampler_of()
    there = graph_rows(40)
    batch.put(range(len(there)), [row.params for row in there], **so_far_of(there))
    slots = torch.tensor(chosen)
    hidden = torch.randn(5, 3, D, generator=torch.Generator().manual_seed(sum(chosen)))
    drafts, at = torch.full((5, 2), 7), torch.arange(5) + 4
    read = batch.select(slots)
    expected = sampler(hidden[:, 0], read, at), verify(sampler, hidden, drafts, read, at)
    with GPU:
        known = batch.select(slots, host=kind(chosen))
        found = sampler(hidden[:, 0], known, at), verify(sampler, hidden, drafts, known, at)
    assert known._view_of(5).plan.stored_list == read._view_of(5).plan.stored_list
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.status.tolist() == other.status.tolist()
        assert (one.logprobs is None) == (other.logprobs is None)
        if other.logprobs is not None:
            assert torch.equal(one.logprobs.token_ids, other.logprobs.token_ids)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_verification_is_of_its_own_slots(backend, method):
    """One selection is used again, with slots that the host knows and with others."""
    batch, sampler = SamplingBatch.of_slots(9, vocab_size=V), sampler_of(backend)
    there = graph_rows(40)
    batch.put(range(len(there)), [row.params for row in there], **so_far_of(there))
    hidden = torch.randn(3, 2, D, generator=torch.Generator().manual_seed(3))
    drafts, at, held = torch.full((3, 1), 7), torch.arange(3) + 4, None
    for chosen, host in (
        ([6, 2, -1], True),
        ([1, 5, 0], False),
        ([1, 99, 0], True),
        ([2, 2, 5], True),
    ):
        slots = torch.tensor(chosen)
        expected = verify(sampler, hidden, drafts, batch.select(slots), at, method=method)
        with GPU:
            held = batch.select(slots, host=chosen if host else None, out=held)
            found = verify(sampler, hidden, drafts, held, at, method=method)
        assert found.token_ids.tolist() == expected.token_ids.tolist(), chosen
        assert found.status.tolist() == expected.status.tolist(), chosen


def test_rows_of_one_method_lie_together_and_none_is_copied():
    """So do rows that report logprobs, if no others stand between them."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 5},
        {"logprobs": 2},
        {"top_p": 0.8, "top_k": 1500},
        {},
        {"top_k": 7},
        {"logprobs": 1},
        {"min_p": 0.1},
    ]
    params = [SamplingParams(seed=i, **each) for i, each in enumerate(kinds)]
    plan = SamplingBatch.from_params(params, vocab_size=2000).plan
    assert plan.stored_list == [1, 5, 0, 7, 3, 2, 6]
    assert plan.filters is not None and plan.logprobs is not None
    places = [place for _, place, _ in plan.filters.methods]
    assert places == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert plan.logprobs.places == slice(5, 7)
    with_sets = SamplingBatch.from_params(params, vocab_size=2000, kept_cap=3).plan
    assert with_sets.stored_list == list(range(8)), "sets are listed in the order of the rows"


def test_a_graph_is_of_any_slots_although_the_host_knows_those_of_its_capture():
    batch = _eight_slots(top_p=0.9)
    with GPU, patch("tpsample.request.selection.capturing", lambda _: True):
        plan = batch.select(torch.tensor([0, 1]), host=[0, 1])._view_of(2).plan
    assert plan.fixed_rounds and plan.stored_list == [0, 1]


def test_a_batch_that_never_waits_does_not_wait_for_slots_that_the_host_knows():
    params = [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=2)]
    batch = SamplingBatch.from_params(params, vocab_size=V, fixed_rounds=True)
    with GPU:
        plan = batch.select(torch.tensor([1, 0]), host=[1, 0])._view_of(2).plan
    assert plan.fixed_rounds and plan.stored_list == [1]


def test_a_selection_that_is_used_again_forgets_what_the_host_knew():
    batch = _eight_slots(top_p=0.9)
    with GPU:
        rows = batch.select(torch.tensor([0, 1]), host=[0, 1])
        assert rows._view_of(2).plan.stored_list == []
        rows = batch.select(torch.tensor([3, 1]), out=rows)
        assert rows._view_of(2).plan.stored_list == [0, 1]


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ([0, 2], r"^host: expected the 2 numbers that slots has, got \[0, 2\]; leave it out"),
        ([0], r"^host: expected the 2 numbers that slots has, got \[0\]; leave it out where"),
        ([0.0, 1.0], "^host: expected the numbers of slots as a list, an array or a tensor on"),
        ("01", "^host: expected the numbers of slots as a list, an array or a tensor on the h"),
        (torch.empty(2, device="meta", dtype=torch.int64), "^host: expected the numbers of slots"),
        (1, "^host: expected the numbers of slots as a list, an array or a tensor on the host"),
    ],
)
def test_other_numbers_on_the_host_are_refused(host, told):
    with pytest.raises((TypeError, ValueError), match=told):
        _eight_slots().select(torch.tensor([0, 1]), host=host)
    _eight_slots().select(torch.tensor([0, 1]))  # as it advises


def test_a_graph_keeps_the_memory_of_its_verification_to_itself():
    """A replay fills what a capture has made, so that no later step may read it."""
    batch, sampler = SamplingBatch.of_slots(3, vocab_size=V), sampler_of()
    batch.put([0, 1], [SamplingParams(seed=slot) for slot in range(2)])
    rows, hidden = batch.select(torch.tensor([1, 0])), torch.randn(2, 2, D)
    drafts, at = torch.full((2, 1), 7), torch.arange(2)
    with patch("tpsample.request.selection.capturing", lambda _: True):
        verify(sampler, hidden, drafts, rows, at)
    assert not rows._repeats
    verify(sampler, hidden, drafts, rows, at)
    assert list(rows._repeats) == [2]
