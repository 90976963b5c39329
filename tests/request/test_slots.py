"""Requests keep their slots for life: a step names its rows by a tensor, each row its own."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from tests.support.replays import Replays
from tests.support.rows import Row, batch_of, so_far_of
from tests.support.slots import D, V, sampler_of
from tpsample import (
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
    verify,
)
from tpsample.filters import sample as filters
from tpsample.request.plan import BatchPlan
from tpsample.request.selection import MOST_PLANS

SLOTS = 9


def assert_rows(out, expected, slots: list[int], drawn: list[int]) -> None:
    """The drawn rows are those of `expected`, and the others are as they must be."""
    for name in ("token_ids", "status", "seeds"):
        assert getattr(out, name)[drawn].tolist() == getattr(expected, name).tolist(), name
    others = [i for i in range(len(slots)) if i not in drawn]
    assert (out.token_ids[others] == -1).all()
    padding = [Status.OK if slots[i] == -1 else Status.BAD_SLOT for i in others]
    assert out.status[others].tolist() == padding
    if expected.logprobs is not None:
        ids, values = out.logprobs.token_ids[drawn], out.logprobs.values[drawn]
        for row in range(len(drawn)):
            asked = expected.logprobs.token_ids[row] >= 0
            found = ids[row] >= 0
            assert ids[row][found].tolist() == expected.logprobs.token_ids[row][asked].tolist()
            assert values[row][found].tolist() == expected.logprobs.values[row][asked].tolist()
    if out.logprobs is not None:
        assert (out.logprobs.token_ids[others] == -1).all()


GRAPH_KINDS: list[dict[str, Any]] = [
    {"top_p": 0.7, "repetition_penalty": 1.6},
    {"top_k": 4, "logit_bias": {3: 4.0}, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"top_k": 4, "top_p": 0.6, "bad_words": [[5], [3, 4]]},
    {"min_p": 0.1, "allowed_token_ids": list(range(2, 40))},
    {"logprobs": 1, "top_p": 0.5, "logprobs_mode": "processed_logprobs"},
    {},
]


def graph_rows(seed: int) -> list[Row]:
    """A request of each kind, with tokens so far."""
    pick = random.Random(seed)
    tokens = [[pick.randrange(9) for _ in range(6)] for _ in GRAPH_KINDS]
    return [
        Row.of({"seed": seed + i, **kind}, its[:3], its[3:])
        for i, (kind, its) in enumerate(zip(GRAPH_KINDS, tokens, strict=True))
    ]


@pytest.mark.parametrize("methods", [False, True], ids=["sample", "verify"])
def test_a_captured_step_serves_other_slots_and_other_requests(methods):
    """Between two replays only what is on the device changes."""
    sampler, batch = sampler_of(), SamplingBatch.of_slots(SLOTS, vocab_size=V)
    there = dict(enumerate(graph_rows(100)))
    for slot, row in there.items():
        batch.put(slot, row.params, **so_far_of([row]))
    batch.prepare(VocabShard(0, V))
    slots, positions = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    hidden_states, drafts = torch.zeros(5, 3, D), torch.zeros(5, 2, dtype=torch.int64)

    def step():
        rows = batch.select(slots)
        if methods:
            out = verify(sampler, hidden_states, drafts, rows, positions)
        else:
            out = sampler(hidden_states[:, 0].contiguous(), rows, positions)
        rows.append(out.token_ids)
        return out

    key = batch.capture_key
    slots.fill_(-1)  # padding alone, so that the capture moves no state
    with Replays() as graph:
        out = step()
    generator = torch.Generator().manual_seed(8)
    for chosen in ([3, -1, 0, 6, 4], [6, 5, 1, -1, 99], [1, 2, 3, 2, 7], [0, 4, 5, 6, 3]):
        new = graph_rows(200 + sum(chosen))
        for slot in chosen[:2]:  # requests come where others were
            if slot in there:
                row = there[slot] = new[slot]
                batch.put([slot], [row.params], **so_far_of([row]))
        assert batch.capture_key == key
        slots.copy_(torch.tensor(chosen))
        positions.copy_(torch.arange(5) + sum(chosen))
        hidden_states.copy_(torch.randn(5, 3, D, generator=generator))
        drawn = [i for i, s in enumerate(chosen) if s in there and s not in chosen[:i]]
        rows, fresh_sampler = [there[chosen[place]] for place in drawn], sampler_of()
        fresh = batch_of(rows, V)
        plain = fresh_sampler(hidden_states[drawn, 0], fresh, positions[drawn])
        drafts.zero_()[drawn, 0] = plain.token_ids
        graph.replay()
        if methods:
            arguments = hidden_states[drawn], drafts[drawn], fresh, positions[drawn]
            expected = verify(fresh_sampler, *arguments)
            assert out.num_accepted[drawn].tolist() == expected.num_accepted.tolist()
            assert expected.num_accepted.sum() >= len(drawn)
            assert out.token_ids[drawn].tolist() == expected.token_ids.tolist()
            others = [i for i in range(5) if i not in drawn]
            assert (out.token_ids[others] == -1).all() and (out.num_accepted[others] == 0).all()
        else:
            expected = plain
            assert_rows(out, expected, chosen, drawn)
        for row, tokens in zip(rows, expected.token_ids.view(len(rows), -1).tolist(), strict=True):
            row.output += [token_id for token_id in tokens if token_id >= 0]


def test_a_step_of_all_slots_is_refused_while_one_is_empty():
    sampler, batch = sampler_of(), SamplingBatch.of_slots(3, vocab_size=V)
    batch.put([0, 2], [SamplingParams(seed=1), SamplingParams(seed=2)])
    for call in (
        lambda: sampler(torch.zeros(3, D), batch, 1),
        lambda: verify(sampler, torch.zeros(3, 1, D), torch.zeros(3, 0).long(), batch, 1),
        lambda: reference.sample(torch.zeros(3, V), batch, 1),
    ):
        with pytest.raises(ValueError, match=r"slots \[1\] have no request; name the slots of the"):
            call()
    batch.put(1, SamplingParams(seed=3))
    assert (sampler(torch.zeros(3, D), batch, 1).status == Status.OK).all()


def test_a_seed_that_was_written_before_the_first_step_is_the_rows():
    sampler, hidden_states = sampler_of(), torch.randn(3, D)
    batch = SamplingBatch.from_params([SamplingParams(), SamplingParams(seed=5)], vocab_size=V)
    batch.seed[0] = 7
    assert sampler(hidden_states[:2], batch, 1).seeds.tolist() == [7, 5]
    own = SamplingBatch.from_params([SamplingParams()] * 3, vocab_size=V)
    assert len(set(sampler(hidden_states, own, 1).seeds.tolist())) == 3


def test_the_capture_key_tells_when_launches_change():
    batch = SamplingBatch.of_slots(3, vocab_size=V)
    keys = [batch.capture_key]
    for fields in (
        {"top_p": 0.9}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9, "filter_order": "joint"},
        {"top_k": 6}, {"logprobs": 1}, {"logprobs": 1, "logprobs_mode": "processed_logits"},
        {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"bad_words": [[1]]},
        {"bad_words": [[1, 2, 3]]}, {"allowed_token_ids": [1]}, {"logprob_token_ids": [1]},
    ):  # fmt: skip
        batch.put(len(keys) % 3, SamplingParams(seed=1, **fields))
        keys.append(batch.capture_key)
    assert len(set(keys)) == len(keys)
    batch.put(0, SamplingParams(seed=2, allowed_token_ids=[4, 5], temperature=0.3))
    batch.put(0, SamplingParams(seed=3, allowed_token_ids=[7], temperature=0.0))
    last = batch.capture_key
    batch.put(0, SamplingParams(seed=2, allowed_token_ids=[4, 5], temperature=0.3))
    assert batch.capture_key == last
    batch.permute([1, 0, 2])
    assert batch.capture_key != last


def test_seeds_are_drawn_before_a_replay():
    sampler, batch = sampler_of(), SamplingBatch.of_slots(3, vocab_size=V)
    batch.put([0, 2], [SamplingParams(), SamplingParams(seed=4)])
    assert batch.unseeded == [0]
    sampler.draw_seeds(batch)
    assert batch.unseeded == [] and batch.seed.tolist()[1:] == [0, 4] and batch.seed[0] > 0


def test_a_slot_that_is_named_twice_counts_its_first_row():
    """A stop id is held back until the output has two tokens. That of a row that is not drawn is
    a token, too."""
    batch, sampler = SamplingBatch.of_slots(2, vocab_size=V), sampler_of(on_failed=8)
    params = SamplingParams(temperature=0.0, seed=0, min_tokens=2, stop_token_ids=[7])
    batch.put(0, params)
    logits = torch.zeros(3, V)
    logits[:, 7], logits[:, 8] = 2.0, 1.0
    for expected in ([8, 8, 8], [8, 8, 8], [7, 8, 8]):
        picked = batch.select(torch.tensor([0, 0, -1]))
        out = sampler.sample_logits(logits, picked, 1)
        assert out.token_ids.tolist() == expected
        picked.append(out.token_ids)


def test_a_cpu_searches_no_row_that_is_decided(monkeypatch):
    searched, search = [], filters.search

    def counted(rows: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        searched.append(len(rows.logits))
        return search(rows, *arguments, **options)

    monkeypatch.setattr(filters, "search", counted)
    sampler, batch = sampler_of(), SamplingBatch.of_slots(4, vocab_size=V)
    kinds = {"top_p": 0.9}, {}, {"top_k": 40, "ties": "keep", "top_p": 0.9}, {"top_k": 3}
    batch.put(range(4), [SamplingParams(seed=i, **each) for i, each in enumerate(kinds)])
    hidden = torch.randn(4, D, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([3, 0, 2, 1])
    read = sampler(hidden, batch.select(slots), 0).token_ids
    assert searched == [1]  # the row that the threshold alone decides
    monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())
    assert torch.equal(sampler(hidden, batch.select(slots), 0).token_ids, read)
    assert searched == [1, 4]


def test_equal_slots_have_one_plan_until_a_request_changes():
    """A new selection of these slots makes nothing anew, and few plans are kept."""
    batch = SamplingBatch.of_slots(6, vocab_size=V)
    batch.put(range(6), [SamplingParams(seed=i, top_p=0.9) for i in range(6)])

    def plan(*slots: int) -> BatchPlan:
        return batch.select(torch.tensor(slots))._view_of(len(slots)).plan

    first = plan(2, 0)
    assert plan(2, 0) is first and plan(0, 2) is not first
    for other in itertools.permutations(range(6), 2):
        plan(*other)
    assert len(batch._table.plans) <= MOST_PLANS
    before = plan(2, 0)
    batch.put(0, SamplingParams(seed=9, top_k=3))
    assert plan(2, 0).requests != before.requests


def test_slots_that_a_host_reads_have_the_plan_of_their_requests():
    """Whatever the other slots need, and whatever an earlier selection was of."""
    batch, rows = SamplingBatch.of_slots(6, vocab_size=V), None
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"logprob_token_ids": [3, 4]},
        {"top_k": 3, "logprobs": 1},
        {},
        {"min_p": 0.2, "temperature": 0.5},
    ]
    params = [SamplingParams(seed=i, **kind) for i, kind in enumerate(kinds)]
    batch.put(range(5), params)
    for chosen in ([4, -1, 0, 3], [2, 1, 5, 0], [0, 1, 2, 3], [3, -1, 3, 5]):
        rows = batch.select(torch.tensor(chosen), out=rows)
        plan, none = rows._view_of(4).plan, SamplingParams(temperature=0.0, seed=0)
        first = {slot: row for row, slot in reversed(list(enumerate(chosen))) if 0 <= slot < 5}
        its = [params[s] if first.get(s) == row else none for row, s in enumerate(chosen)]
        expected = SamplingBatch.from_params(its, vocab_size=V).plan
        assert (plan.filters is None) == (expected.filters is None)
        if expected.filters is not None:
            assert plan.filters.row_list == expected.filters.row_list
            assert plan.filters.kinds == expected.filters.kinds
            assert torch.equal(plan.filters.columns[:8], expected.filters.columns[:8])
        assert (plan.logprobs is None) == (expected.logprobs is None)
        if expected.logprobs is not None:
            width = expected.logprobs.chosen.shape[1]
            assert plan.logprobs.row_list == expected.logprobs.row_list
            assert plan.logprobs.top_of.tolist() == expected.logprobs.top_of.tolist()
            assert torch.equal(plan.logprobs.chosen[:, :width], expected.logprobs.chosen)
            # As many columns as any slot needs, as where the host does not read the slots.
            assert (plan.logprobs.top, plan.logprobs.chosen.shape[1]) == (1, 2)
        assert plan.stored_list == expected.stored_list


def test_a_row_without_filters_beside_one_with_top_k_keeps_all_of_its_tokens(monkeypatch):
    """Also by its way: requests with top_k alone would take one exchange."""
    monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())
    batch = SamplingBatch.of_slots(3, vocab_size=V)
    batch.put([0, 2], [SamplingParams(seed=5, top_k=2), SamplingParams(seed=6)])
    logits = torch.zeros(16, V)  # equal, so that few tokens are among the first two
    sampler, position = sampler_of(), torch.arange(2)
    for _ in range(8):
        position = position + 2
        out = sampler.sample_logits(logits[:2], batch.select(torch.tensor([2, 0])), position)
        params = [SamplingParams(seed=6), SamplingParams(seed=5, top_k=2)]
        fresh = SamplingBatch.from_params(params, vocab_size=V)
        expected = reference.sample(logits[:2], fresh, position)
        assert out.token_ids.tolist() == expected.token_ids.tolist()
