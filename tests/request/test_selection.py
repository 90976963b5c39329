"""Selections of slots: stale after a change, copied, and refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.support.rows import bitmask_of
from tests.support.slots import WEIGHT, D, V, sampler_of
from tpsample import (
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
    sample_draft,
    verify,
)

CHANGES = {
    "free": lambda batch: batch.free(1),
    "put": lambda batch: batch.put(1, SamplingParams(seed=9)),
    "update": lambda batch: batch.update(0, SamplingParams(seed=9)),
    "permute": lambda batch: batch.permute([1, 2, 0]),
    "drop": lambda batch: batch.drop(0),
    "arrange": lambda batch: batch.arrange([0, 2, 1]),
    "add": lambda batch: (batch.drop(2), batch.add(SamplingParams(seed=9))),
}


MASKS = {
    "grammar_bitmask": lambda ids: bitmask_of([{i} for i in ids], V),
    "forced_token_ids": torch.tensor,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MASKS)
def test_a_selection_and_masks_of_rows_that_changed_are_refused(name, change):
    """A step would take some of what it reads from before the change, and some from after it."""
    sampler, batch = sampler_of(), SamplingBatch.of_slots(3, vocab_size=V)
    kinds = [{"top_k": 1, "temperature": 5.0}, {"temperature": 5.0}, {"frequency_penalty": 1.0}]
    batch.put([0, 1, 2], [SamplingParams(seed=i, **kind) for i, kind in enumerate(kinds)])
    rows, hidden_states = batch.select(torch.tensor([0, 1])), torch.randn(2, D)
    drafts = torch.zeros(2, 0, dtype=torch.int64)
    setattr(batch, name, MASKS[name]([3, 9, 4]))
    tokens = sampler(hidden_states, rows, 1).token_ids
    assert tokens.tolist() == [3, 9]
    CHANGES[change](batch)
    for call in (
        lambda: sampler(hidden_states, rows, 2),
        lambda: verify(sampler, hidden_states.unsqueeze(1), drafts, rows, 2),
        lambda: sample_draft(sampler, torch.zeros(2, V), rows, 2, 0),
        lambda: reference.sample(torch.zeros(2, V), rows, 2),
        lambda: rows.append(tokens),
    ):
        with pytest.raises(ValueError, match=r"joined, left, .* call batch.select again"):
            call()
    again = batch.select(torch.tensor([0, 1]), out=rows)
    with pytest.raises(ValueError, match=f"batch.{name}: .*assign it anew"):
        sampler(hidden_states, again, 2)
    setattr(batch, name, MASKS[name]([5, 6, 7][: batch.rows]))
    found = sampler(hidden_states, again, 2).token_ids.tolist()
    assert found == [5, -1 if change == "free" else 6]
    setattr(batch, name, None)
    logits = reference.logits(hidden_states, WEIGHT)
    expected = reference.sample(logits, batch.select(torch.tensor([0, 1])), 2)
    assert torch.equal(sampler(hidden_states, again, 2).token_ids, expected.token_ids)


def _pickled(its: Any) -> Any:
    return pickle.loads(pickle.dumps(its))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, copy.copy])
def test_a_copy_of_a_batch_lives_by_itself(copied, inference):
    """A copy knows what its batch knows by identity, or by memory that tensors share. Later calls
    write to its tensors, whatever the mode was in which it was made."""
    params = [SamplingParams(seed=i, frequency_penalty=-2.0, top_p=0.9) for i in range(4)]
    batch = SamplingBatch.of_slots(5, vocab_size=V)
    batch.put([0, 1, 2], params[:3])
    batch.prepare(VocabShard(0, V))
    rows = batch.select(torch.arange(5))
    with torch.inference_mode(inference):
        one = copied is copy.copy
        other, others = (copy.copy(batch), None) if one else copied((batch, rows))
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(2))

    def tokens(of: SamplingBatch, used: Any = None) -> tuple[list[int], ...]:
        out = sampler_of().sample_logits(logits, used or of.select(torch.arange(5)), 7)
        return out.token_ids.tolist(), out.status.tolist(), out.seeds.tolist()

    before = tokens(batch)
    assert before[1] == [0, 0, 0, Status.BAD_SLOT, Status.BAD_SLOT]
    assert tokens(other) == tokens(other, others) == before
    other.seed[1] += 5
    assert tokens(other)[2][1] == before[2][1] + 5
    other.seed[1] -= 5
    other.put(3, params[3])
    other.free(0)
    other.permute([4, 3, 2, 1, 0])
    with pytest.raises(ValueError, match=r"slots \[0, 4\] have no request"):
        sampler_of().sample_logits(logits, other, 7)
    other.select(torch.arange(5)).append(torch.full((5, 4), 11))
    other.temperature[1], other.seed[2] = 0.0, 99
    fresh = SamplingBatch.of_slots(5, vocab_size=V)
    fresh.put([1, 2, 3], params[:0:-1], output_token_ids=[[11] * 4] * 3)
    fresh.temperature[1], fresh.seed[2] = 0.0, 99
    assert tokens(other) == tokens(fresh)
    assert tokens(batch) == tokens(batch, rows) == before


def test_masks_by_slot_follow_the_slots():
    batch = SamplingBatch.of_slots(4, vocab_size=V)
    batch.put([0, 1, 3], [SamplingParams(seed=i) for i in range(3)])
    batch.forced_token_ids = torch.tensor([10, -1, 12, 13])
    sampler, hidden_states = sampler_of(), torch.randn(4, D)
    out = sampler(hidden_states, batch.select(torch.tensor([3, -1, 0, 1])), 5)
    assert out.token_ids.tolist()[:3] == [13, -1, 10]
    picked = batch.select(torch.tensor([3, 0]))
    picked.forced_token_ids = torch.tensor([7, -1])
    tokens = sampler(hidden_states[:2], picked, 5).token_ids.tolist()
    assert tokens[0] == 7 and tokens[1] != 10
    again = batch.select(torch.tensor([3, 0]), out=picked)  # without the mask of its own
    assert sampler(hidden_states[:2], again, 5).token_ids.tolist() == [13, 10]
    picked.forced_token_ids = torch.tensor([7, -1])
    rows = hidden_states.view(2, 2, D)
    drafts = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="has a row per slot, but a verification needs one per"):
        verify(sampler, rows, drafts, batch.select(torch.tensor([3, 0])), 5)
    with pytest.raises(ValueError, match="expected a row for each of the 4 rows of the step"):
        verify(sampler, rows, drafts, picked, 5)
    batch.put(1, SamplingParams(seed=9))
    with pytest.raises(ValueError, match="assign it anew"):
        sampler(hidden_states[:1], batch.select(torch.tensor([3])), 5)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("slots", [[-1, -1], [2, -1], [5, 0], [0, 0]])
def test_masks_of_fewer_rows_than_slots_have_none_for_what_is_not_drawn(rows, slots):
    """A row outside the mask would end the process on a GPU."""
    params = [SamplingParams(seed=i) for i in range(rows)]
    batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=6)
    batch.forced_token_ids = torch.arange(rows)
    bits = bitmask_of([{i} for i in range(3)], V)
    batch.grammar_bitmask = bits[:rows]
    out = sampler_of()(torch.randn(2, D), batch.select(torch.tensor(slots)), 5)
    drawn = [slot < rows and slot not in slots[:i] for i, slot in enumerate(slots)]
    expected = [s if s >= 0 and d else -1 for s, d in zip(slots, drawn, strict=True)]
    assert out.token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda b: b.select([0]), r"slots: expected a tensor \[B\] of int32 or int64 on cpu"),
        (lambda b: b.select(torch.zeros(1)), r"slots: expected a tensor \[B\] of int32"),
        (lambda b: b.select(torch.zeros(1, 1, dtype=torch.int64)), "slots: expected"),
        (lambda b: b.select(torch.zeros(1), out=1), r"slots: expected a tensor \[B\] of int32"),
        (lambda b: b.select(torch.tensor([0]), out=b), "out: expected a Selection, got Sampling"),
        (lambda b: b.select(torch.tensor([0]), out=b.select(torch.tensor([0, 1]))),
         "out: expected an earlier selection of 1 rows, as slots has, got one of 2"),
        (lambda b: b.select(torch.tensor([0]), out=SamplingBatch.of_slots(
            2, vocab_size=V).select(torch.tensor([0]))), "of this batch, got another batch's"),
        (lambda b: b.put(3, SamplingParams()), r"^slots: expected slots in \[0, 3\), got 3$"),
        (lambda b: b.put([0, 0], [SamplingParams()] * 2), "^slots: .* once, got 2 requests"),
        (lambda b: b.put([0, 1], SamplingParams()), "^slots: expected as many as requests"),
        (lambda b: b.put(0, SamplingParams(logit_bias={99: 1.0})), "expected ids in"),
        (lambda b: b.free(-1), r"^slots: expected slots in \[0, 3\), got -1$"),
        (lambda b: b.select(torch.tensor([0])).append(torch.tensor([1, 2])), "a selection of 1"),
        (lambda b: sampler_of()(torch.zeros(2, D), b.select(torch.tensor([0])), 1), "expected 2"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_argument(call, told):
    with pytest.raises((TypeError, ValueError), match=told):
        call(SamplingBatch.of_slots(3, vocab_size=V))


def test_a_copied_selection_keeps_its_slots_and_its_batch():
    sampler, hidden_states = sampler_of(), torch.randn(2, D)
    params = [SamplingParams(seed=seed) for seed in range(4)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    rows = batch.select(torch.tensor([2, 0]))
    other = copy.copy(rows)
    batch.select(torch.tensor([1, 3]), out=rows)
    assert sampler(hidden_states, other, 1).seeds.tolist() == [2, 0]
    other.forced_token_ids = torch.tensor([7, 7])
    assert rows.forced_token_ids is None
    batch.seed[2] += 1
    assert sampler(hidden_states, other, 1).seeds[0] == 3


def test_a_copied_selection_knows_the_steps_of_its_batch():
    """Samples of one are alternatives for the other, too."""
    batch = SamplingBatch.from_params([SamplingParams(frequency_penalty=1.0)] * 2, vocab_size=V)
    rows = batch.select(torch.tensor([0, 1]))
    other = copy.copy(rows)
    out = sampler_of()(torch.zeros(2, D), rows, 1, num_samples=3)
    with pytest.raises(ValueError, match=r"^token_ids: got the 3 samples of each row"):
        other.append(out.token_ids)


def test_rows_that_are_read_while_their_slots_are_found_are_those_of_the_slots(monkeypatch):
    """As in the handler of a signal."""
    batch = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(4)], vocab_size=V)
    rows, compare, read = batch.select(torch.tensor([2, 0, -1])), torch.ne, []

    def read_and_compare(*given: Any, **named: Any) -> torch.Tensor:
        if not read:
            read.append(None)
            read.append(rows.seed.tolist())
        return compare(*given, **named)

    monkeypatch.setattr(torch, "ne", read_and_compare)
    assert rows.seed.tolist() == read[1]
    assert rows.seed[:2].tolist() == [2, 0]
