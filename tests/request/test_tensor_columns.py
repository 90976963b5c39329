"""Batches of an engine's tensors: the tokens of requests with these numbers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.cases import own_sampler
from tests.support.fields import OTHER_FILTERS, VALUES
from tests.support.ranks import run_ranks
from tests.support.rows import bitmask_of
from tests.support.same_rows import assert_same_rows
from tests.support.slots import GPU, WEIGHT, D, V, sampler_of
from tests.support.tiers import thinned
from tpsample import RankMismatch, SamplingBatch, SamplingParams, reference, sample_draft, verify
from tpsample.core.rules import RULES, TOP_K

ROWS = 8
ORDERS: Any = ("sequential", "joint", "min_p_last")
FILTERS = ("top_k", "top_p", "min_p")
RULE_OF = {rule.name: rule for rule in RULES}
KNOWN = ("read", "host", "unknown")


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


def requests(its: dict[str, torch.Tensor], order: Any = "sequential") -> list[SamplingParams]:
    """The same as requests."""
    rows = zip(*(its[name].tolist() for name in its), strict=True)
    return [SamplingParams(**dict(zip(its, row, strict=True)), filter_order=order) for row in rows]


def batch_of(its: dict[str, torch.Tensor], known: str = "read", **how: Any) -> SamplingBatch:
    """A batch whose host reads the numbers, has them as well, or does not know them."""
    if known == "host":
        how["host"] = {name: its[name].tolist() for name in FILTERS if name in its}
    with nullcontext() if known == "read" else GPU:
        return SamplingBatch.from_tensors(vocab_size=V, **its, **how)


@pytest.mark.parametrize(
    ("given", "known", "order"),
    thinned(
        [FILTERS, ("top_p",), ("top_k", "min_p"), ()],
        KNOWN,
        ORDERS,
        one_in=3,
        also=[(some, "unknown", "sequential") for some in (FILTERS, ("top_k", "min_p"))],
    ),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_tensors_draw_what_requests_with_these_numbers_draw(known, order, given):
    sampler, hidden_states = sampler_of(), torch.randn(ROWS, 2, D)
    drafts, slots = torch.zeros(ROWS, 1, dtype=torch.int64), torch.tensor([3, 0, 6, -1])
    for seed in range(4):
        its = {n: each for n, each in tensors(seed).items() if n not in FILTERS or n in given}
        batch = batch_of(its, known, filter_order=order)
        assert batch.plan.fixed_rounds == bool(known == "unknown" and given)  # it reads no device
        plain = SamplingBatch.from_params(requests(its, order), vocab_size=V)
        expected = sampler(hidden_states[:, 0], plain, 9).token_ids
        assert torch.equal(sampler(hidden_states[:, 0], batch, 9).token_ids, expected)
        assert torch.equal(
            verify(sampler, hidden_states, drafts, batch, 9).token_ids,
            verify(sampler, hidden_states, drafts, plain, 9).token_ids,
        )
        rows = sampler(hidden_states[:4, 0], batch.select(slots), 9).token_ids
        chosen = SamplingBatch.from_params([plain.requests[i] for i in (3, 0, 6)], vocab_size=V)
        assert torch.equal(rows[:3], sampler(hidden_states[:3, 0], chosen, 9).token_ids)


@pytest.mark.parametrize("slots", [[-1, 0, 1, 2], [3, -1, 0, 1], [2, 2, 1, 0], [1, 2, 0, -1]])
def test_rows_without_a_request_may_stand_before_those_that_the_host_does_not_know(slots):
    """On a GPU, from slots that the host knows: padding, a slot that is named twice, none."""
    its = tensors(7) | {"top_k": torch.tensor([3, 5, 2, 4] * 2)}
    sampler, hidden_states = sampler_of(), torch.randn(4, D)
    batch = batch_of(its, "unknown")
    with GPU:
        found = sampler(hidden_states, batch.select(torch.tensor(slots), host=slots), 9).token_ids
    for row, slot in enumerate(slots):
        alone = SamplingBatch.from_params([requests(its)[slot]], vocab_size=V)
        right = sampler(hidden_states[row : row + 1], alone, 9).token_ids.item()
        assert found[row] == (-1 if slot < 0 or slot in slots[:row] else right)


def test_a_request_without_filters_may_stand_before_rows_that_the_host_does_not_know():
    its = tensors(7) | {"top_k": torch.tensor([3, 5, 2, 4] * 2)}
    sampler, hidden_states, plain = sampler_of(), torch.randn(ROWS, D), SamplingParams(seed=5)
    batch = batch_of(its, "unknown")
    with GPU:
        for row in (0, 4):
            batch.update(row, plain)
        found = sampler(hidden_states, batch, 9).token_ids
    same = requests(its)
    same[0] = same[4] = plain
    expected = SamplingBatch.from_params(same, vocab_size=V)
    assert_same_rows(found, sampler(hidden_states, expected, 9).token_ids, same)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", OTHER_FILTERS)
def test_every_other_rule_may_be_a_tensor(name, known):
    sampler, hidden_states, its = sampler_of(), torch.randn(ROWS, D), tensors(5)
    values = (RULE_OF[name].off, *VALUES[name])
    its = {each: its[each] for each in ("temperature", "seed", "top_p")}
    its[name] = torch.tensor([values[i % len(values)] for i in range(ROWS)], dtype=torch.float64)
    how = (
        {"host": {each: its[each].tolist() for each in ("top_p", name)}} if known == "host" else {}
    )
    with nullcontext() if known == "read" else GPU:
        batch = SamplingBatch.from_tensors(vocab_size=V, **its, **how)
    plain = SamplingBatch.from_params(requests(its), vocab_size=V)
    expected = sampler(hidden_states, plain, 9).token_ids
    assert_same_rows(sampler(hidden_states, batch, 9).token_ids, expected, plain.requests)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_number_means_itself_and_one_beyond_the_range_one_within_it(rule):
    values = [rule.off, rule.example, *VALUES[rule.name]]
    expected = [rule.read(each, V) if rule is TOP_K else each for each in values]
    assert rule.meant(torch.tensor(values, dtype=torch.float64), V).tolist() == expected
    beyond = torch.tensor([-torch.inf, -1e30, -1e-30, 1e30, torch.inf], dtype=torch.float64)
    found = rule.meant(beyond.clamp(-(2.0**31), 2.0**31) if rule is TOP_K else beyond, V).tolist()
    assert all(map(rule.valid, found)), found


def test_a_number_that_is_none_may_be_on_the_host_too():
    top_p = torch.tensor([math.nan, 0.5])
    given = {"vocab_size": 8, "temperature": torch.ones(2), "seed": torch.arange(2)}
    batch = SamplingBatch.from_tensors(**given, top_p=top_p, host={"top_p": top_p.clone()})
    assert [each.top_p for each in batch.requests] == [1.0, 0.5]
    with pytest.raises(ValueError, match="host: expected the 2 numbers that top_p has"):
        SamplingBatch.from_tensors(**given, top_p=top_p, host={"top_p": torch.tensor([1.0, 0.5])})


def test_an_unknown_rule_is_named():
    with pytest.raises(TypeError, match=r"^typical_p: expected a tensor of one of top_k, top_p"):
        SamplingBatch.from_tensors(vocab_size=V, **tensors(5), typical_p=torch.ones(ROWS))


def test_a_step_launches_what_the_host_knows_that_its_rows_need():
    its = tensors(3) | {"top_k": torch.tensor([0, 5] + [0] * 6), "top_p": torch.ones(ROWS)}
    del its["min_p"]
    plans = {known: batch_of(its, known).plan for known in KNOWN}
    for known in ("read", "host"):
        assert plans[known].stored_list == [1] and not plans[known].fixed_rounds
    assert plans["unknown"].stored_list == list(range(ROWS)) and plans["unknown"].fixed_rounds
    plain = batch_of({name: its[name] for name in ("temperature", "seed")}, "unknown").plan
    assert plain.stored_list == []


def test_the_batch_is_an_ordinary_one_afterwards():
    sampler, its, hidden_states = sampler_of(), tensors(6), torch.randn(ROWS, D)
    batch = batch_of(its)
    before = {name: each.clone() for name, each in its.items()}
    for each in its.values():
        each.zero_()  # copied: the engine's next step may write
    batch.temperature[0], batch.seed[0] = 0.5, 77
    before["temperature"][0], before["seed"][0] = 0.5, 77
    plain = SamplingBatch.from_params(requests(before), vocab_size=V)
    for each in (batch, plain):
        each.drop(5)
        each.permute([*range(ROWS - 1)][::-1])
        each.add(SamplingParams(seed=4, repetition_penalty=1.5), prompt_token_ids=[4, 5])
        each.forced_token_ids = torch.tensor([5] + [-1] * (ROWS - 1))
        each.grammar_bitmask = bitmask_of([set(range(30))] * ROWS, V)
    out = sampler(hidden_states, batch, 1)
    assert out.token_ids.tolist() == sampler(hidden_states, plain, 1).token_ids.tolist()
    assert out.token_ids[0] == 5 and out.token_ids.max() < 30


@pytest.mark.parametrize("known", KNOWN)
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
@pytest.mark.filterwarnings("ignore:.*counts as:UserWarning")
def test_values_out_of_range_have_a_meaning(name, values, means, known):
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
    plain = SamplingBatch.from_params(requests(meant), vocab_size=V)
    expected = reference.sample(logits, plain, 3).token_ids.tolist()
    batch = batch_of(its, known)
    assert sampler_of().sample_logits(logits, batch, 3).token_ids.tolist() == expected
    assert 5 not in expected
    if name == "top_p" and means < 1e-9:
        assert expected == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("known", ["read", "host"])
@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_shares_of_an_engine_that_are_out_of_range_are_told_of(name, known):
    its = {"temperature": torch.ones(3), "seed": torch.arange(3), name: torch.tensor([0.5, 90, 1])}
    with pytest.warns(UserWarning, match=f"^{name}: expected .*, got 90 in row 1, ") as warned:
        batch_of(its, known)
    assert [each.filename for each in warned] == [__file__]


def test_a_draft_at_an_infinite_temperature_is_one():
    its = {"temperature": torch.full((2,), torch.inf), "seed": torch.arange(2)}
    batch, logits = batch_of(its), torch.zeros(2, V)
    logits[:, 3:] = -torch.inf
    drawn = sample_draft(sampler_of(), logits, batch, 1, 0).token_ids
    assert (drawn >= 0).all() and (drawn < 3).all()


def test_tensors_with_gradients_are_read():
    its = {name: each.requires_grad_(each.is_floating_point()) for name, each in tensors(2).items()}
    batch = batch_of(its)
    assert not batch.temperature.requires_grad
    assert sampler_of()(torch.randn(ROWS, D), batch, 3).token_ids.min() >= 0


def _quickest(make: Callable[[], object]) -> float:
    """Seconds of this thread, in the best of some calls."""
    taken = []
    for _ in range(20):
        start = time.thread_time()
        make()
        taken.append(time.thread_time() - start)
    return min(taken)


def test_a_step_builds_a_batch_in_a_fifth_of_the_time_of_requests():
    rows, pick = 512, random.Random(1)
    its = {
        "temperature": torch.ones(rows),
        "seed": torch.arange(rows),
        "top_k": torch.tensor([pick.choice([0, 20, 50]) for _ in range(rows)]),
        "top_p": torch.tensor([pick.choice([1.0, 0.9, 0.95]) for _ in range(rows)]),
    }
    listed = _quickest(lambda: SamplingBatch.from_params(requests(its), vocab_size=V))
    for known in KNOWN:
        assert _quickest(lambda known=known: batch_of(its, known)) < listed / 5, known


SAME: dict[str, Any] = {
    "temperature": torch.full((2,), 3.0),
    "seed": torch.arange(2),
    "top_k": torch.full((2,), 4),
    "top_p": torch.full((2,), 0.5),
    "min_p": torch.full((2,), 0.1),
}


def _other_numbers() -> tuple[list[list[str]], list[int]]:
    """Each rank's own numbers or order in one of two rows; a step of both ranks after."""
    rank, told = dist.get_rank(), []
    sampler, hidden_states = own_sampler(WEIGHT), torch.ones(2, D)
    others = [
        {name: values + torch.tensor([0, rank * 0.25 if values.is_floating_point() else rank])}
        for name, values in SAME.items()
    ]
    others.append({"filter_order": ORDERS[rank]})
    for other in others:
        batch = SamplingBatch.from_tensors(vocab_size=V, **(SAME | other))
        texts = []
        for rows in (batch, batch.select(torch.tensor([1, 0]))):
            with pytest.raises(RankMismatch) as error:
                sampler(hidden_states, rows, 1)
            texts.append(str(error.value))
        told.append(texts)
    right = sampler(hidden_states, SamplingBatch.from_tensors(vocab_size=V, **SAME), 1)
    return told, right.token_ids.tolist()


def test_ranks_with_other_numbers_or_another_order_are_told_each_value():
    first, second = run_ranks(2, _other_numbers)
    assert first == second
    all_told, tokens = first
    for name, texts in zip(("temperatures", "seeds", *FILTERS), all_told, strict=False):
        for row, of, text in zip((1, 0), ("row", "slot"), texts, strict=True):
            told = f"batch: {of} 1: {name}:" if name in FILTERS else f"{name}: row {row}:"
            assert text.startswith(told), text
    for text in all_told[-1]:
        assert "filter_order: " in text and "'sequential'" in text and "'joint'" in text, text
    assert sampler_of()(torch.ones(2, D), batch_of(SAME), 1).token_ids.tolist() == tokens


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
        ({"filter_order": "any"}, "filter_order: expected"),
        ({"fixed_rounds": 1}, "fixed_rounds: expected a bool"),
        ({"vocab_size": 0}, "vocab_size: expected"),
        ({"host": {"top_k": [1] * ROWS}}, r"host: expected the numbers of \['min_p', 'top_k'"),
        ({"host": [1] * ROWS}, "host: expected the numbers of"),
        ({"host": dict.fromkeys(FILTERS, "x")}, "host: expected numbers of top_k, got 'x'"),
        (
            {"host": dict.fromkeys(FILTERS, np.full(ROWS, 3))},
            f"host: expected the {ROWS} numbers that top_k has, on the host, got",
        ),
    ],
    ids=str,
)
def test_a_wrong_column_names_the_argument(change, told):
    with pytest.raises((TypeError, ValueError), match=told):
        SamplingBatch.from_tensors(**{"vocab_size": V} | tensors(5) | change)
