"""After a warm-up, requests of its kinds launch no kernel that was not launched then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.launches import filled, listed
from tests.support.cases import own_sampler
from tests.support.fields import OTHER_FILTERS, VALUES
from tests.support.ranks import same_on_ranks
from tests.support.tiers import long
from tests.support.virtual import small_tiles
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    sample_draft,
    verify,
)
from tpsample.backends.triton_.tile_table import batch_tile, tile_ends
from tpsample.request.kinds import KINDS, Kind
from tpsample.request.params import LogprobsMode

V, D = 400, 16
OTHERS = {
    "plain": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.5},
    "top_k, top_p": {"top_k": 256, "top_p": 0.99},
    "many top_k, top_p": {"top_k": 350, "top_p": 0.8},
    "top_k beside top_p": {"top_k": 9, "top_p": 0.6, "filter_order": "joint"},
    "top_p in top_k": {"top_p": 0.7, "top_k": 350, "ties": "keep"},
    "min_p": {"min_p": 0.3},
    "logprobs": {"logprobs": 3, "temperature": 0.5},
    "allowed ids": {"allowed_token_ids": list(range(3, 300, 7))},
    "bad words": {"bad_words": [[7], [2, 3, 4], [11, 12]]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [1, 4, 8]},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 4.0, 8: -3.0}},
    "grammar": {},
    "forced": {},
    "kept sets": {},
    **{name: {name: VALUES[name][0]} for name in OTHER_FILTERS},
}
"""Another request of each kind."""
SEARCHED: list[tuple[Kind, dict]] = [
    ("top_p", {"top_p": 1e-9}),
    ("min_p", {"min_p": 1.0}),
    ("top_k", {"top_k": 300}),
    ("top_k", {"top_k": 1, "ties": "keep"}),
    ("top_p in top_k", {"top_k": 300, "top_p": 0.01, "filter_order": "joint"}),
]
"""Requests whose best scores by noise, at a high temperature, are not in the kept set."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    """The host reads nothing of the device, so that lists have the room of a GPU's."""
    monkeypatch.setattr("tpsample.core.tensors.READ_ON", ())


def _weight() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def _batch(
    requests: list[dict], vocab_size: int = V, kind: str = "", **options: Any
) -> SamplingBatch:
    if kind == "kept sets":
        options = {"kept_cap": 5, **options}
    rows = [SamplingParams(seed=row, **each) for row, each in enumerate(requests)]
    so_far = [[1, 2, 3]] * len(rows)
    batch = SamplingBatch.from_params(
        rows, vocab_size=vocab_size, prompt_token_ids=so_far, output_token_ids=so_far, **options
    )
    if kind == "grammar":
        batch.grammar_bitmask = torch.full((len(rows), 13), 5, dtype=torch.int32)
    if kind == "forced":
        batch.forced_token_ids = torch.arange(len(rows)) - 1  # and the first row is free
    return batch


def _step(sampler: LMHeadSampler, batch: Any, positions: Any = 5, **out: Any) -> None:
    shape = batch.rows, sampler.weight.shape[1]
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sampler(hidden, batch, positions, **out)


@contextmanager
def _nothing_new(
    sampler: LMHeadSampler, *arguments: Any, run_them: bool = False, **options: Any
) -> Iterator[None]:
    """Warm up; then the body launches something, and nothing that the warm-up did not launch.

    If no kernel runs, a launch that follows from the results of others is in neither list.
    """
    with listed(run_them) as warm, filled():
        sampler.warm_up(*arguments, **options)
    with listed(run_them) as later, filled():
        yield
    assert later and not set(later) - set(warm)


IN_CI: tuple[Kind, ...] = (
    *("top_p", "top_k, top_p", "top_p in top_k", *OTHER_FILTERS),
    *("logprobs", "penalties", "grammar", "kept sets"),
)
each_kind = pytest.mark.parametrize(
    "kind", [*IN_CI, *long(*(kind for kind in KINDS if kind not in IN_CI))]
)


@each_kind
def test_another_request_of_a_kind_launches_nothing_new(kind):
    sampler = LMHeadSampler(_weight(), backend="triton")
    with _nothing_new(sampler, [kind], run_them=True):
        for fixed_rounds in (False, True):
            _step(sampler, _batch([OTHERS[kind]] * 3, kind=kind, fixed_rounds=fixed_rounds))


@pytest.mark.parametrize(
    ("kind", "fields"), [SEARCHED[0], SEARCHED[3], *long(*SEARCHED[1:3], SEARCHED[4])]
)
def test_rows_that_their_best_scores_leave_undecided_are_warm(kind, fields):
    sampler = LMHeadSampler(_weight(), backend="triton")
    with _nothing_new(sampler, [kind], run_them=True):
        for fixed_rounds in (False, True):
            hot = [{**fields, "temperature": 50.0}] * 2
            _step(sampler, _batch(hot, fixed_rounds=fixed_rounds))
    assert sampler.counters()["second_rounds"]


@pytest.mark.parametrize("kept_cap", [None, 5])
@pytest.mark.parametrize("fields", [{}, KINDS["logprobs"]])
def test_a_mix_is_warm_with_kept_sets_and_without(kept_cap, fields):
    """In fixed rounds rows by first words and others leave each other out as rows that are done.
    Where sets or logprobs of them are asked for, all rows go one way."""
    kinds: list[Kind] = ["top_k", "top_p", "logprobs", "kept sets"]
    sampler = LMHeadSampler(_weight(), backend="triton")
    requests = [OTHERS[kind] | fields for kind in ("top_k", "top_p")]
    with _nothing_new(sampler, kinds):
        _step(sampler, _batch(requests, kept_cap=kept_cap, fixed_rounds=True))


@pytest.mark.parametrize("kind", ["top_k", "top_p", *long("top_k beside top_p", "min_p", "plain")])
@pytest.mark.parametrize("report", ["kept sets", "logprobs"])
def test_sets_that_first_words_hold_and_others_are_warm(kind, report):
    """A cold row keeps few tokens and a hot one many, so that it is searched."""
    sampler = LMHeadSampler(_weight(), backend="triton")
    with _nothing_new(sampler, [kind, report], run_them=True):
        for temperature in (1e-3, 50.0):
            fields = OTHERS[kind] | KINDS[report] | {"temperature": temperature}
            _step(sampler, _batch([fields] * 3, kind=report))


def test_logprobs_are_warm_with_each_kind_that_first_words_decide():
    """Many logprobs are warmed up with the first kind alone, and a mix of kinds is searched."""
    kinds: list[Kind] = ["top_k", "top_k beside top_p", "logprobs"]
    sampler = LMHeadSampler(_weight(), backend="triton")
    with _nothing_new(sampler, kinds):
        for kind in kinds[:2]:
            _step(sampler, _batch([OTHERS[kind] | KINDS["logprobs"]] * 2))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("others", [(), ("top_p",), ("bias",)])
def test_many_logprobs_are_warm_too(others: tuple[Kind, ...], given: bool):
    """With a bias some are of logits before it, and the LM head tells no words of these. A sampler
    of given logits has no prompt, whose logprobs launch the same."""
    weight = torch.zeros(V, 0) if given else _weight()
    sampler = LMHeadSampler(weight, vocab_size=V, backend="triton")
    more = dict(pair for kind in others for pair in KINDS[kind].items())
    with _nothing_new(sampler, ["logprobs", *others], run_them=True):
        for many in ({"logprobs": 50}, {"logprobs": 3, "logprob_token_ids": list(range(60))}):
            modes = get_args(LogprobsMode)
            batch = _batch([{**many, **more, "logprobs_mode": mode} for mode in modes])
            if given:
                sampler.sample_logits(torch.zeros(len(modes), V), batch, 3)
            else:
                _step(sampler, batch)


def test_logprobs_of_a_prompt_are_warm():
    sampler = LMHeadSampler(_weight(), backend="triton")
    with _nothing_new(sampler, ["logprobs"], run_them=True):
        for top in (0, 1, 20, 33, 60):
            sampler.prompt_logprobs(torch.zeros(3, D), torch.arange(3), top=top)


@pytest.mark.parametrize("max_rows", [1, 7, 16, 24, 48, 100, 192, 200, 256, 600])
def test_every_batch_tile_is_warmed_up(max_rows):
    ends = tile_ends(max_rows)
    assert max(ends) <= max_rows
    every = {batch_tile(rows) for rows in range(1, max_rows + 1)}
    assert {batch_tile(rows) for rows in ends} == every


@pytest.mark.parametrize("kind", ["top_k", "top_k, top_p", "top_p", "penalties", "kept sets"])
def test_steps_over_slots_are_warm(kind):
    sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
    slots = SamplingBatch.of_slots(5, vocab_size=V, kept_cap=7 if kind == "kept sets" else None)
    slots.put([3, 0], [SamplingParams(seed=1, **OTHERS[kind])] * 2)
    with _nothing_new(sampler, [kind], run_them=True):
        _step(sampler, slots.select(torch.tensor([0, -1, 3])))


def test_filtered_rows_with_controls_are_warm_at_any_number_of_rows():
    """Their processed logits begin behind the raw ones, at an address that depends on the rows."""
    sampler = small_tiles(LMHeadSampler(torch.zeros(403, D), backend="triton"))
    both = {**OTHERS["top_p"], **OTHERS["penalties"]}
    with _nothing_new(sampler, ["top_p", "penalties"], rows=[4]):
        for rows in (1, 2, 3, 4, 5):
            _step(sampler, _batch([both] * rows, 403, fixed_rounds=True))


@pytest.mark.parametrize("kind", ["plain", "top_k", "top_p", "logprobs", "grammar"])
def test_views_at_odd_places_are_warm(kind):
    sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
    batch = _batch([OTHERS[kind]] * 4, fixed_rounds=True)
    if kind == "grammar":
        batch.grammar_bitmask = torch.full((4 * 13 + 1,), -1, dtype=torch.int32)[1:].view(4, 13)
    whole = SampleOutput.empty(torch.zeros(5, dtype=torch.int64), None)
    views = SampleOutput(whole.token_ids[1:], whole.status[1:], whole.seeds[1:])
    with _nothing_new(sampler, [kind]):
        _step(sampler, batch, torch.arange(5)[1:], out=views)


@each_kind
def test_kept_sets_of_each_kind_are_warm(kind):
    for kinds in ([], [[kind, "kept sets"]]):
        sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
        with _nothing_new(sampler, *kinds):
            for kept_cap in (2, 5, V):
                how = {"kept_cap": kept_cap, "fixed_rounds": True}
                _step(sampler, _batch([OTHERS[kind]] * 2, kind=kind, **how))


@pytest.mark.parametrize(("max_rows", "ids"), [(1, 1), (2, 9), (8, 9), *long((3, 2))])
def test_a_small_sampler_is_warmed_up_by_all_kinds(max_rows, ids):
    sampler = LMHeadSampler(torch.zeros(ids, 4), backend="torch", max_rows=max_rows)
    sampler.warm_up(num_samples=max_rows, num_drafts=max_rows - 1)
    most = max_rows - 1
    with pytest.raises(ValueError, match=f"^num_drafts: expected an int from 0 to {most}, got"):
        sampler.warm_up(num_drafts=max_rows)


def test_every_mix_that_the_head_tells_apart_is_warm():
    sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
    kinds = ["top_p", "bias", "penalties", "min_tokens", "forced"]
    with _nothing_new(sampler):
        for count in (2, 3, 4):
            for mix in combinations(kinds, count):
                fields: dict[str, Any] = {}
                for kind in mix:
                    fields |= OTHERS[kind]
                last = mix[-1]  # which may be "forced"
                _step(sampler, _batch([fields] * 2, kind=last, fixed_rounds=True))


@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("kind", ["plain", "top_p", "penalties", "bad words", "kept sets"])
def test_verification_is_warm(kind, method):
    sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
    batch = _batch([OTHERS[kind]] * 2, kind=kind, fixed_rounds=True)
    drafts, hidden = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 3, D)
    with _nothing_new(sampler, [kind], num_drafts=3):
        verify(sampler, hidden, drafts, batch, 5, method=method)
        for dtype in (torch.float32, torch.bfloat16):
            law = torch.zeros(2, 2, V, dtype=dtype)
            sample_draft(sampler, law[:, 1], batch, 5, 1, method=method)
            if method != "coupled":
                verify(sampler, hidden, drafts, batch, 5, method=method, draft_logits=law)


@pytest.mark.parametrize("num_drafts", [3, 31, 40, 70])
def test_any_number_of_drafts_up_to_that_of_a_warm_up_is_warm(num_drafts):
    sampler = small_tiles(LMHeadSampler(_weight(), backend="triton"))
    with _nothing_new(sampler, ["plain"], num_drafts=num_drafts):
        for later in {1, 31, max(31, num_drafts // 2), max(31, num_drafts)}:
            drafts, hidden = torch.zeros(1, later, dtype=torch.int64), torch.zeros(1, later + 1, D)
            verify(sampler, hidden, drafts, _batch([{}]), 5, method="block")


def test_an_unknown_kind_is_refused_before_a_step():
    sampler = LMHeadSampler(_weight())
    with pytest.raises(ValueError, match=r"^kinds: expected some of 'plain', .*, got 'topk'"):
        sampler.warm_up(["plain", "topk"])
    assert set(OTHERS) == set(KINDS)


def _warm_and_step() -> str:
    """Ranks warm up together, and step; then a kind is wrong on one of them."""
    with own_sampler(_weight()) as sampler:
        sampler.warm_up(list(KINDS))
        _step(sampler, _batch([OTHERS["top_p"]]))
        with pytest.raises(RankMismatch) as error:
            sampler.warm_up(["plain" if dist.get_rank() else "topk"])
        return str(error.value)


def test_ranks_warm_up_together_and_refuse_together():
    assert "kinds: expected" in same_on_ranks(2, _warm_and_step)
