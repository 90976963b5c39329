"""Filters and logprobs in a fixed number of rounds: the same tokens, and no look at the device."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.lab import calls
from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support import host_reads
from tests.support.cases import uneven_shards
from tests.support.filtered import Rows, V, assert_same, grid, kinds_of_logits, masked
from tests.support.ranks import run_ranks
from tests.support.same_rows import assert_same_rows
from tests.support.tiers import long
from tests.support.tile_words import told
from tpsample import SampleOutput, SamplingBatch, SamplingParams
from tpsample.backends import room_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core import score, word
from tpsample.core.row_noise import RowNoise
from tpsample.filters.finish import draw_filtered, shard_logits
from tpsample.ranks.ranks import Ranks
from tpsample.request import plan
from tpsample.request.row_filter import BY_FIRST_WORDS
from tpsample.request.step import Step

KINDS = kinds_of_logits()
FIXED = {"fixed_rounds": True}
SEARCH = 4
"""Exchanges of a search, one for each digit of a logit."""
UNFILTERED = word.pack(torch.tensor(math.inf), torch.tensor(0))
"""The word that stays of a row that no filter draws: the best score at id 0."""


def on_virtual_ranks(
    logits: torch.Tensor,
    batch: SamplingBatch,
    backend: str,
    world_size: int,
    num_samples: int | None = None,
) -> list[SampleOutput]:
    """Return what every rank makes of the filtered rows of a batch, from position 11 on.

    In fixed rounds the host may neither read a tensor nor send one.

    Args:
        logits: fp32 [F, V], of the rows that the batch stores.
    """
    shards = uneven_shards(logits.shape[1], world_size)
    world, view = VirtualWorld(shards), batch._view_of(batch.rows)
    noise = RowNoise(batch.temperature, batch.seed, 11 + torch.arange(batch.rows), num_samples or 1)

    def finish(ranks: Ranks) -> SampleOutput:
        shard = shards[ranks.rank]
        own = logits[:, shard.start : shard.stop].clone()
        out = SampleOutput.empty(view.seed, num_samples)
        step = Step(own[:, :0], view, noise, None, own, out)
        if backend == "triton":
            step.tile_words = told(shard_logits(step, shard, backend)).tile_words
        with host_reads.refused() if batch.plan.fixed_rounds else nullcontext():
            filtered = draw_filtered(shard_logits(step, shard, backend), step, ranks)
        words = UNFILTERED.repeat(1, out.token_ids.numel())
        room_of(backend).decoder()(words, view.seed, out, None, filtered.words)
        return out

    return world.run([partial(finish, ranks) for ranks in world.ranks])


def _rows() -> list[Rows]:
    """Plain, greedy, filtered and asking rows; nothing but filtered rows; masked tokens; rows with
    a top_p of what a large top_k leaves."""
    asking = [
        SamplingParams(seed=i, logprobs=3, logprobs_mode=mode, logprob_token_ids=[7], **changes)
        for i, (mode, changes) in enumerate(
            (
                ("raw_logprobs", {}), ("processed_logprobs", {"top_p": 0.7}),
                ("processed_logits", {"top_k": 300, "top_p": 0.7}), ("raw_logits", {"top_k": 5}),
                ("processed_logprobs", {"temperature": 0.0}),
            )
        )
    ]  # fmt: skip
    mixed = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0, seed=2),
        *grid()[::61],
        *asking,
    ]
    large = [SamplingParams(top_k=1030, top_p=0.5, seed=i) for i in range(40)]
    return [
        Rows([KINDS["zipf"], KINDS["two-valued"]], mixed, **FIXED),
        Rows([KINDS["ramp-in-shards"]], grid()[3::41], **FIXED),
        Rows([KINDS["normal"]], asking[1:4], bias=masked(30, 1100), **FIXED),
        # A share of all ids in place of the first 1030 would keep 85 more, and these win 1 in 7.
        Rows([KINDS["all-equal"]], large, **FIXED),
    ]


def _sample(cases: list[Rows], num_samples: int | None) -> list[SampleOutput]:
    host_reads.meet_on_devices()
    outputs = []
    for rows in cases:
        sampler, batch = rows.sampler(chunks=2), rows.batch
        sampler(rows.hidden_states, rows.batch, 0)  # the first one compares hidden states
        with host_reads.refused():
            given = rows.hidden_states, batch, rows.positions
            outputs.append(sampler(*given, num_samples=num_samples))
    return outputs


@pytest.mark.parametrize(("world_size", "num_samples"), [(1, None), (3, 2)])
def test_tokens_and_logprobs_are_the_oracles_without_a_host_read(world_size, num_samples):
    cases = _rows()
    expected = [rows.oracle(num_samples) for rows in cases]
    for outputs in run_ranks(world_size, _sample, cases, num_samples):
        for out, oracle in zip(outputs, expected, strict=True):
            assert_same(out, oracle)


def test_raw_logprobs_beside_a_top_k_are_of_logits_without_a_bias():
    """Those of the rows' filters are other first words."""
    params = [
        SamplingParams(seed=i, logprobs=3, logit_bias={900: 40.0}, **fields)
        for i, fields in enumerate(({"top_k": 5}, {"top_p": 0.7}))
    ]
    rows = Rows([KINDS["zipf"]], params, **FIXED)
    assert_same(rows.sampler()(rows.hidden_states, rows.batch, rows.positions), rows.oracle())


MIXTURE = [{"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("requests", "exchanges"),
    [
        ([{"top_p": 0.9}], 3 + SEARCH),
        ([{"top_k": 9}], 1),
        ([{"top_k": 256}], 1),
        ([{"top_k": 256, "filter_order": "joint"}], 1),
        ([{"top_k": 257}], 3 + SEARCH),
        ([{"top_k": 9, "ties": "keep"}], 3 + SEARCH),
        ([{"top_k": 9, "top_p": 0.9, "filter_order": "joint"}], 2),
        ([{"top_k": 9, "top_p": 0.9, "filter_order": "joint", "ties": "keep"}], 3 + 2 * SEARCH),
        ([{"top_k": 257, "top_p": 0.9, "filter_order": "joint"}], 3 + 2 * SEARCH),
        ([{"min_p": 0.1}], 2),
        ([{"top_p": 0.9, "top_k": 9}], 1),
        ([{"top_p": 0.9, "top_k": 300}], 1),
        ([{"top_p": 0.9, "top_k": 300, "ties": "keep"}], 2 + 2 * SEARCH),
        ([{"top_p": 0.9, "min_p": 0.1}], 3 + SEARCH),
        ([{"top_p": 0.9, "min_p": 0.1, "filter_order": "min_p_last", "ties": "keep"}], 3 + SEARCH),
        ([{"top_p": 0.9, "top_k": 9, "min_p": 0.1, "filter_order": "min_p_last"}], 1),
        ([{"top_p": 0.9, "top_k": 300, "min_p": 0.1, "filter_order": "min_p_last"}], 1),
        (MIXTURE, 4 + SEARCH),
        ([{"top_k": 9}, {"min_p": 0.1}], 3),
        ([*MIXTURE, {"top_k": 300, "top_p": 0.9}], 4 + SEARCH),
        ([*MIXTURE, {"top_k": 300, "top_p": 0.9, "ties": "keep"}], 4 + 2 * SEARCH),
    ],
    ids=str,
)
def test_a_search_that_no_request_needs_is_left_out(requests, exchanges, world_size):
    """The words of the ranks beside them. Plain PyTorch searches one rank in rounds too."""
    params = [SamplingParams(seed=i, **r) for i, r in enumerate(requests)]
    rows = Rows([KINDS["normal"]], params, **FIXED)
    with calls.exchanges() as taken:
        outputs = on_virtual_ranks(rows.logits, rows.batch, "torch", world_size)
    for out in outputs:
        assert torch.equal(out.token_ids, rows.oracle().token_ids)
    assert len(taken) == exchanges * world_size


@pytest.mark.parametrize(("below", "searched"), [(0, True), (1e-7, True), (0.01, False)])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_limit_within_the_error_of_masses_is_searched(below, searched, fixed, monkeypatch):
    """Four equal tokens in two shards: a top_p near n / 4 may keep one more for all that is known.

    The first n are drawn from in either case.
    """
    ids, logits = [3, 140, 700, 1190], torch.full((V,), -math.inf)
    logits[ids] = 1.0
    params = [SamplingParams(top_p=n / 4 - below, seed=s) for n in (1, 2, 3) for s in range(8)]
    rows, decided = Rows([logits], params, fixed_rounds=fixed), _noted_decisions(monkeypatch)
    for out in on_virtual_ranks(rows.logits, rows.batch, "triton", 2):
        drawn = [set(part.tolist()) for part in out.token_ids.split(8)]
        assert drawn == [set(ids[:1]), set(ids[:2]), set(ids[:3])]
    assert len(decided) == 2 and torch.equal(*decided) and decided[0].all() != searched


@pytest.mark.parametrize("fixed", [False, True])
def test_an_infinite_logit_is_the_token_that_filters_keep(fixed):
    """Its row has no masses to weigh in fp32."""
    logits = KINDS["normal"].clone()
    logits[700] = math.inf
    params = [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=2, top_k=300)]
    rows = Rows([logits], params, fixed_rounds=fixed)
    for out in on_virtual_ranks(rows.logits, rows.batch, "triton", 2):
        assert out.token_ids.tolist() == [700, 700]
        assert torch.equal(out.token_ids, rows.oracle().token_ids)


def test_the_check_leaves_no_trace_when_ranks_cross():
    """The first rank to come may be the first to go."""
    product, one, other = score.exact_products, host_reads.refused(), host_reads.refused()
    for step in (one.__enter__, other.__enter__):
        step()
    assert score.exact_products is not product
    for rank in (one, other):
        rank.__exit__(None, None, None)
    assert score.exact_products is product


def test_only_a_plain_step_needs_no_flag():
    """With filters the host reads, which the check sees."""
    params = [SamplingParams(seed=1), SamplingParams(temperature=0.0, seed=2)], grid()[3::41]
    plain, filtered = (Rows([KINDS["zipf"]], its) for its in params)
    sampler = filtered.sampler()
    steps = [(each.hidden_states, each.batch, each.positions) for each in (plain, filtered)]
    with host_reads.refused():
        out = sampler(*steps[0])
        with pytest.raises(host_reads.HostRead):
            sampler(*steps[1])
    assert_same(out, plain.oracle())


def test_a_captured_step_takes_fixed_rounds_by_itself(monkeypatch):
    rows = _rows()[0]
    oracle, rows.options = rows.oracle(), {}
    sampler, given = rows.sampler(), (rows.hidden_states, rows.batch, rows.positions)
    monkeypatch.setattr(plan, "capturing", lambda device: True)
    with host_reads.refused():
        out = sampler(*given)
    assert_same(out, oracle)

    rows.options = {"kept_cap": 4}
    sampler, given = rows.sampler(), (rows.hidden_states, rows.batch, rows.positions)
    with host_reads.refused():
        out = sampler(*given)
    assert torch.equal(out.token_ids, oracle.token_ids)
    assert len(out.kept.token_ids) == 4 * len(rows.params)


# -- rows that a rejection decides beside rows that it leaves to the threshold ------------------


def _mixture_of_ways(num_rows: int) -> Rows:
    """Every way of a row beside the others, flat rows that 8 scores rarely decide among them."""
    requests: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_p": 0.01, "temperature": 50.0},
        {"top_k": 20},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 500, "top_p": 0.9, "temperature": 50.0, "ties": "keep"},
        {"top_k": 2, "temperature": 50.0, "ties": "keep"},
        {"top_k": 30, "top_p": 0.05, "temperature": 50.0},
        {"top_k": 2, "top_p": 0.01, "temperature": 50.0, "filter_order": "joint"},
        {"min_p": 0.99, "temperature": 3.0},
        {"top_p": 0.3, "min_p": 0.9, "temperature": 9.0, "filter_order": "min_p_last"},
        {"top_p": 1e-6, "min_p": 0.05},
    ]
    picked = [requests[i % len(requests)] for i in range(num_rows)]
    return Rows([KINDS["normal"]], [SamplingParams(seed=i, **r) for i, r in enumerate(picked)])


# The interpreter computes with the NaN of a row as a GPU does, and warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "world_size", "num_samples"),
    [
        ("torch", 1, None),
        ("torch", 3, 2),
        ("triton", 2, None),
        *long(("triton", 1, None), ("triton", 1, 2), ("triton", 3, 2)),
    ],
)
def test_decided_and_undecided_rows_of_one_step(monkeypatch, backend, world_size, num_samples):
    """Each has its own token, where a rejection decides some of them and leaves others."""
    decided = _noted_decisions(monkeypatch)
    rows = _mixture_of_ways(11 if backend == "triton" else 33)
    rows.bias = masked(30, 500)
    oracle = rows.oracle(num_samples)
    batch = SamplingBatch.from_params(rows.params, vocab_size=V, fixed_rounds=True)
    for out in on_virtual_ranks(rows.logits, batch, backend, world_size, num_samples):
        its = rows.params, rows.logits, rows.positions
        assert_same_rows(out.token_ids, oracle.token_ids, *its)
        assert torch.equal(out.status, oracle.status)
    assert len(decided) == world_size
    few = rows.batch.plan.filters.column(BY_FIRST_WORDS)
    assert decided[0][few].all() and few.any()
    assert decided[0][~few].any() and not decided[0][~few].all()


def _noted_decisions(monkeypatch) -> list[torch.Tensor]:
    """A list that grows by what each rejection decides."""
    decided: list[torch.Tensor] = []
    first_kept = {kind: kind.first_kept for kind in (ShardLogits, TritonShardLogits)}

    def noted(self, *arguments):
        verdict = first_kept[type(self)](self, *arguments)
        decided.append(verdict.decided)
        return verdict

    for kind in first_kept:
        monkeypatch.setattr(kind, "first_kept", noted)
    return decided
