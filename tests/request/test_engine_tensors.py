"""Parameters that stay in an engine's own tensors: the tokens of requests with these numbers."""

from __future__ import annotations

import copy
import math
import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import own_sampler
from tests.support.random_requests import bitmask_of
from tests.support.ranks import run_ranks
from tests.support.replays import Replays
from tests.support.slots import WEIGHT, D, V, sampler_of
from tpsample import (
    Needs,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    Status,
    reference,
    sample_draft,
    verify,
)

ROWS = 8
ORDERS = ("sequential", "joint", "min_p_last")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Numbers as an engine has them, most of them on and some off."""
    pick = random.Random(seed)

    def of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([pick.choice(values) for _ in range(ROWS)], dtype=dtype)

    return {
        "temperature": of([0.0, 0.5, 1.0, 1.7], torch.float32),
        "seed": torch.tensor([pick.getrandbits(62) for _ in range(ROWS)]),
        "top_k": of([0, -1, 1, 3, 20, V], torch.int32),
        "top_p": of([1.0, 0.3, 0.8], torch.float32),
        "min_p": of([0.0, 0.05, 0.4], torch.float32),
    }


def requests(its: dict[str, torch.Tensor], order: str = "sequential") -> list[SamplingParams]:
    """The same as requests."""
    rows = zip(*(its[name].tolist() for name in its), strict=True)
    return [SamplingParams(**dict(zip(its, row, strict=True)), filter_order=order) for row in rows]


def test_slots_and_replays_read_what_is_there_now():
    sampler, its = sampler_of(), tensors(3)
    batch = SamplingBatch.over(vocab_size=V, **its)
    slots, positions = torch.full((4,), -1), torch.zeros(4, dtype=torch.int64)
    hidden_states, drafts = torch.zeros(4, 2, D), torch.zeros(4, 1, dtype=torch.int64)
    with Replays() as graph:
        out = verify(sampler, hidden_states, drafts, batch.select(slots), positions)
    for step, chosen in enumerate(3 * ([5, -1, 0, 7], [1, 2, 8, 1])):
        for name, new in tensors(20 + step).items():
            its[name].copy_(new)
        slots.copy_(torch.tensor(chosen))
        hidden_states.copy_(torch.randn(4, 2, D))
        graph.replay()
        drawn = [i for i, s in enumerate(chosen) if 0 <= s < ROWS and s not in chosen[:i]]
        params = requests(its)
        fresh = SamplingBatch.from_params([params[chosen[i]] for i in drawn], vocab_size=V)
        expected = verify(sampler_of(), hidden_states[drawn], drafts[drawn], fresh, 0)
        assert out.token_ids[drawn].tolist() == expected.token_ids.tolist()
        others = [i for i in range(4) if i not in drawn]
        status = [Status.OK if chosen[i] == -1 else Status.BAD_SLOT for i in others]
        assert out.status[others].tolist() == status and (out.token_ids[others] == -1).all()


@pytest.mark.parametrize(
    ("name", "values", "means"),
    [
        ("temperature", [math.nan, -1.0, -math.inf, 1e-6], 0.0),
        ("temperature", [math.inf, 3e38], 2.0**100),
        ("top_k", [-7, 0, V, V + 5, 2**31 - 1, -(2**31)], 0),
        ("top_p", [math.nan, 1.0, 7.0, math.inf], 1.0),
        ("top_p", [0.0, -0.5, -math.inf, 1e-30], 1e-30),
        ("min_p", [math.nan, 0.0, -3.0, -math.inf], 0.0),
        ("min_p", [1.5, math.inf], 1.0),
    ],
)
def test_values_out_of_range_have_a_meaning(name, values, means):
    rows = len(values)
    its = {
        "temperature": torch.full((rows,), 0.9),
        "seed": torch.arange(rows),
        "top_k": torch.full((rows,), 30, dtype=torch.int32),
        "top_p": torch.full((rows,), 0.9, dtype=torch.float64),
        "min_p": torch.full((rows,), 0.01, dtype=torch.float64),
    }
    meant = {key: each.clone() for key, each in its.items()}
    its[name] = torch.tensor(values, dtype=its[name].dtype)
    meant[name].fill_(means)
    logits = 4 * torch.randn(rows, V, generator=torch.Generator().manual_seed(rows))
    logits[:, 5] = -math.inf
    batch = SamplingBatch.over(vocab_size=V, **its)
    expected = reference.sample(
        logits, SamplingBatch.from_params(requests(meant), vocab_size=V), 3
    ).token_ids.tolist()
    sampler = sampler_of()
    assert sampler.sample_logits(logits, batch, 3).token_ids.tolist() == expected
    assert 5 not in expected
    if name == "top_p" and means < 1e-9:
        assert expected == logits.argmax(dim=1).tolist()


def test_numbers_that_are_written_to_the_batch_are_those_of_the_engine():
    its = tensors(5)
    batch = SamplingBatch.over(vocab_size=V, **its)
    batch.temperature[0], batch.seed[0] = 0.5, 77
    assert (its["temperature"][0], its["seed"][0]) == (0.5, 77)
    hidden_states = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1))
    fresh = SamplingBatch.from_params(requests(its), vocab_size=V)
    expected = sampler_of()(hidden_states, fresh, 4).token_ids
    assert torch.equal(sampler_of()(hidden_states, batch, 4).token_ids, expected)


def test_masks_of_all_rows_and_of_slots_bind():
    sampler, its = sampler_of(), tensors(6)
    batch = SamplingBatch.over(vocab_size=V, **its)
    hidden_states = torch.randn(ROWS, 1, D)
    batch.forced_token_ids = torch.tensor([5, -1] * (ROWS // 2))
    batch.grammar_bitmask = bitmask_of([{5, 9, 11}] * ROWS, V)
    tokens = sampler(hidden_states[:, 0], batch, 1).token_ids
    assert tokens[::2].tolist() == [5] * (ROWS // 2) and set(tokens.tolist()) <= {5, 9, 11}
    drafts = torch.zeros(ROWS, 0, dtype=torch.int64)
    assert torch.equal(verify(sampler, hidden_states, drafts, batch, 1).token_ids[:, 0], tokens)
    order = torch.tensor([3, 0, 6])
    picked = batch.select(order)
    assert torch.equal(sampler(hidden_states[order, 0], picked, 1).token_ids, tokens[order])
    batch.forced_token_ids = batch.grammar_bitmask = None
    plain = SamplingBatch.from_params(requests(its), vocab_size=V)
    expected = sampler(hidden_states[:, 0], plain, 1).token_ids
    assert torch.equal(sampler(hidden_states[:, 0], batch, 1).token_ids, expected)


def test_slots_that_a_host_reads_have_the_filters_of_the_tensors():
    its = tensors(9)
    batch = SamplingBatch.over(vocab_size=V, **its)
    rows, slots = batch.select(torch.tensor([5, -1, 0])), [5, 0]
    for _ in range(2):
        its["top_k"][5], its["top_p"][0] = its["top_k"][5] + 2, 0.25
        filters = rows._view_of(3).plan.filters
        found = zip(filters.row_list, filters.kinds, strict=True)
        assert {row: (kind.top_k, kind.top_p) for row, kind in found} == {
            row: (its["top_k"][slot] if its["top_k"][slot] > 0 else V, its["top_p"][slot].item())
            for row, slot in zip([0, 2], slots, strict=True)
        }


def test_a_draft_at_an_infinite_temperature_is_one():
    its = {"temperature": torch.full((2,), torch.inf), "seed": torch.arange(2)}
    batch, logits = SamplingBatch.over(vocab_size=V, **its), torch.zeros(2, V)
    assert not batch._stores_logits  # as no filter may occur
    logits[:, 3:] = -torch.inf
    drawn = sample_draft(sampler_of(), logits, batch, 1, 0).token_ids
    assert (drawn >= 0).all() and (drawn < 3).all()
    picked = batch.select(torch.arange(2))
    assert torch.equal(sample_draft(sampler_of(), logits, picked, 1, 0).token_ids, drawn)


CHANGES = {
    "in place": lambda tensor, new: tensor.detach().copy_(new),
    "data": lambda tensor, new: setattr(tensor, "data", new),
    "set_": lambda tensor, new: tensor.detach_().set_(new),
}


@pytest.mark.parametrize("gradients", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_reads_the_memory_that_a_tensor_has_now(change, gradients):
    sampler, its, then = sampler_of(), tensors(4), tensors(9)
    for each in its.values():
        each.requires_grad_(gradients and each.is_floating_point())
    batch, hidden_states = SamplingBatch.over(vocab_size=V, **its), torch.randn(ROWS, D)
    for name, new in [("", None), *then.items()]:
        if name:
            CHANGES[change](its[name], new)
        values = {key: each.detach() for key, each in its.items()}
        fresh = SamplingBatch.from_params(requests(values), vocab_size=V)
        expected = sampler_of()(hidden_states, fresh, 3).token_ids
        assert torch.equal(sampler(hidden_states, batch, 3).token_ids, expected), name
    assert not batch.temperature.requires_grad


@pytest.mark.parametrize("name", tensors(1))
@pytest.mark.parametrize("new", [torch.zeros(ROWS - 1), torch.zeros(ROWS, dtype=torch.int16)])
def test_a_tensor_that_became_another_kind_is_refused(name, new):
    its = tensors(4)
    batch = SamplingBatch.over(vocab_size=V, **its)
    its[name].data = new
    with pytest.raises(ValueError, match=f"{name}: expected .* make a new batch over it"):
        sampler_of()(torch.randn(ROWS, D), batch, 3)


def test_shorter_tensors_need_a_new_batch():
    its, sampler = tensors(4), sampler_of()
    batch, hidden_states = SamplingBatch.over(vocab_size=V, **its), torch.randn(ROWS, D)
    expected = sampler(hidden_states, batch, 3).token_ids[:5]
    for each in its.values():
        each.data = each[:5].clone()
    with pytest.raises(ValueError, match="make a new batch over it"):
        sampler(hidden_states, batch, 3)
    batch = SamplingBatch.over(vocab_size=V, **its)
    assert torch.equal(sampler(hidden_states[:5], batch, 3).token_ids, expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), copy.copy]
)
def test_a_copy_of_an_engines_batch_lives_by_itself(copied):
    sampler, its, hidden_states = sampler_of(), tensors(7), torch.randn(ROWS, D)
    batch = SamplingBatch.over(vocab_size=V, **its)
    rows = batch.select(torch.arange(ROWS))
    before = sampler(hidden_states, batch, 1).token_ids.tolist()
    other = copied(batch)
    others = other.select(torch.arange(ROWS))

    def drawn(*batches):
        return [sampler(hidden_states, each, 1).token_ids.tolist() for each in batches]

    other.forced_token_ids = torch.full((ROWS,), 5)
    assert drawn(batch, rows, other, others) == [before] * 2 + [[5] * ROWS] * 2
    other.forced_token_ids = None
    batch.forced_token_ids, batch.needs = torch.full((ROWS,), 6), Needs()
    assert drawn(other, others, batch) == [before] * 2 + [[6] * ROWS]
    its["seed"] += 1
    assert drawn(other, others) == [before] * 2


@pytest.mark.parametrize("of_tensors", [False, True])
def test_a_copied_selection_keeps_its_slots_and_its_batch(of_tensors):
    sampler, its, hidden_states = sampler_of(), tensors(8), torch.randn(2, D)
    listed = SamplingBatch.from_params(requests(its), vocab_size=V)
    batch = SamplingBatch.over(vocab_size=V, **its) if of_tensors else listed
    rows = batch.select(torch.tensor([2, 0]))
    other, seeds = copy.copy(rows), its["seed"][[2, 0]]
    batch.select(torch.tensor([1, 3]), out=rows)
    assert torch.equal(sampler(hidden_states, other, 1).seeds, seeds)
    other.forced_token_ids = torch.tensor([7, 7])
    assert rows.forced_token_ids is None
    (its["seed"] if of_tensors else batch.seed)[2] += 1
    assert sampler(hidden_states, other, 1).seeds[0] == seeds[0] + 1


SAME: dict[str, Any] = {
    "temperature": torch.full((2,), 3.0),
    "seed": torch.arange(2),
    "top_k": torch.full((2,), 4),
    "top_p": torch.full((2,), 0.5),
    "min_p": torch.full((2,), 0.1),
}


def _other_numbers() -> tuple[list[list[str]], list[int]]:
    """Each rank's own numbers, order or needs in one of two rows; a step of both ranks after."""
    rank, told = dist.get_rank(), []
    sampler, hidden_states = own_sampler(WEIGHT), torch.ones(2, D)
    others = [
        {name: values + torch.tensor([0, rank * 0.25 if values.is_floating_point() else rank])}
        for name, values in SAME.items()
    ]
    others.append({"filter_order": ORDERS[rank]})
    others.append({"needs": (Needs(top_k=True), Needs(top_p=True))[rank]})
    for other in others:
        batch = SamplingBatch.over(vocab_size=V, **(SAME | other))
        texts = []
        for rows in (batch, batch.select(torch.tensor([1, 0]))):
            with pytest.raises(RankMismatch) as error:
                sampler(hidden_states, rows, 1)
            texts.append(str(error.value))
        told.append(texts)
    right = sampler(hidden_states, SamplingBatch.over(vocab_size=V, **SAME), 1)
    return told, right.token_ids.tolist()


def test_ranks_with_other_numbers_or_another_order_are_told_each_value():
    first, second = run_ranks(2, _other_numbers)
    assert first == second
    told, tokens = first
    for name, texts in zip(("temperatures", "seeds", *list(SAME)[2:]), told, strict=False):
        for row, text in zip((1, 0), texts, strict=True):
            assert text.startswith(f"{name}: row {row}: must be the same on every rank, got rank 0")
    for text in told[-2]:
        assert text.startswith("filter_order: ")
        assert text.endswith("got rank 0: sequential, rank 1: joint")
    assert told[-1][0].startswith("needs: must be the same on every rank, got rank 0: Needs(top_k=")
    batch = SamplingBatch.over(vocab_size=V, **SAME)
    assert sampler_of()(torch.ones(2, D), batch, 1).token_ids.tolist() == tokens


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperature": torch.ones(ROWS, dtype=torch.float64)}, "temperature: expected a tensor"),
        ({"top_k": torch.ones(ROWS)}, rf"top_k: expected a tensor \[{ROWS}\] of int32 or int64 on"),
        (
            {"top_p": torch.ones(ROWS + 1)},
            rf"top_p: expected .* \[{ROWS}\] of .* on cpu, as seed has",
        ),
        ({"seed": [1]}, "seed: expected a tensor"),
        ({"min_p": None, "needs": Needs(min_p=True)}, "needs: min_p may occur"),
        ({"needs": {"top_k": True}}, "needs: expected Needs"),
        ({"filter_order": "any"}, "filter_order: expected"),
    ],
    ids=str,
)
def test_what_is_refused_names_the_argument(change, told):
    with pytest.raises((TypeError, ValueError), match=told):
        SamplingBatch.over(vocab_size=V, **tensors(5) | change)
