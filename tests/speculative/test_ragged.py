"""Drafts of different lengths, none at all, and verification from logits of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.slots import WEIGHT, D, V, sampler_of
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    Status,
    VerifyOutput,
    VocabShard,
    reference,
    verify,
    verify_logits,
)
from tpsample.speculative import reference as definition

METHODS = ("coupled", "rejection", "block")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_p": 0.7, "logprobs": 2},
    {"bad_words": [[3], [1, 2], [4, 5, 6]], "min_tokens": 4, "stop_token_ids": [9]},
    {"repetition_penalty": 1.4, "top_k": 6},
)
ROWS, K = 5, 3
GENERATOR = torch.Generator().manual_seed(12)
HIDDEN = torch.randn(ROWS, K + 1, D, generator=GENERATOR)
LOGITS = reference.logits(HIDDEN.flatten(0, 1), WEIGHT).view(ROWS, K + 1, V)


def batch() -> SamplingBatch:
    params = [SamplingParams(seed=70 + i, **kind) for i, kind in enumerate(KINDS)]
    tokens = [[1, 4, 5]] * ROWS
    return SamplingBatch.from_params(
        params, vocab_size=V, prompt_token_ids=tokens, output_token_ids=tokens
    )


def drafts() -> torch.Tensor:
    """Those that plain steps from the same hidden states would draw, where no row counts them."""
    plain = [reference.sample(LOGITS[:, i], batch(), 20 + i).token_ids for i in range(K)]
    return torch.stack(plain, dim=1)


def assert_same(found: VerifyOutput, expected: VerifyOutput) -> None:
    for name in ("num_accepted", "token_ids", "status", "seeds"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None:
        assert torch.equal(found.logprobs.token_ids, expected.logprobs.token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_lengths_end_the_drafts_of_each_row(method):
    """As an id outside the vocabulary does, whatever comes after it."""
    sampler, its, lengths = sampler_of(), drafts(), torch.tensor([2, 0, -5, 3, 99])
    cut = torch.tensor([2, 0, 0, 3, 3]).unsqueeze(1)
    outside = torch.tensor([V, 2**40, -7, -1, -1]).unsqueeze(1)
    marked = its.where(torch.arange(K) != cut, outside)
    for of_dtype in (lengths, lengths.int()):
        out = verify(sampler, HIDDEN, its, batch(), 20, method=method, lengths=of_dtype)
        assert_same(out, verify(sampler, HIDDEN, marked, batch(), 20, method=method))
    assert (out.num_accepted <= cut.flatten()).all()
    assert out.num_accepted[0] == 2 or method != "coupled"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_a_draft_every_row_takes_its_plain_step(backend):
    sampler, none = sampler_of(backend), torch.zeros(ROWS, 0, dtype=torch.int64)
    expected = reference.sample(LOGITS[:, 0], batch(), 20)
    for method in METHODS if backend == "torch" else ("coupled",):
        for lengths in (None, torch.ones(ROWS, dtype=torch.int32)):
            given, rows = {"method": method, "lengths": lengths}, batch()
            out = verify(sampler, HIDDEN[:, :1], none, rows, 20, **given)
            assert out.num_accepted.tolist() == [0] * ROWS and out.status.tolist() == [0] * ROWS
            if method == "coupled":
                assert out.token_ids.tolist() == expected.token_ids.unsqueeze(1).tolist()
            seeds = out.seeds.clone()
            rows.seed.add_(1)
            assert torch.equal(out.seeds, seeds)  # the output is a value
        no_rows = SamplingBatch.from_params([], vocab_size=V)
        empty = verify(sampler, HIDDEN[:0], drafts()[:0], no_rows, 20, method=method)
        assert empty.token_ids.shape == (0, K + 1)
    slots = SamplingBatch.of_slots(2, vocab_size=V)
    slots.put(1, SamplingParams(seed=3, bad_words=[[3, 4]]), output_token_ids=[[3]])
    chosen = slots.select(torch.tensor([-1, 1]))
    out = verify(sampler, HIDDEN[:2, :1], none[:2], chosen, 20)
    assert out.token_ids[0].tolist() == [-1] and 0 <= out.token_ids[1] != 4


def _given(its: torch.Tensor, weightless: bool) -> list[VerifyOutput]:
    shard = VocabShard.even(V, dist.get_rank(), dist.get_world_size())
    rows = slice(shard.start, shard.stop)
    weight = torch.empty(len(shard), 0) if weightless else WEIGHT[rows]
    sampler = LMHeadSampler(weight, shard=shard, max_rows=64, backend="torch", chunks=2)
    found = []
    for method in METHODS:
        law = None if method == "coupled" else LOGITS[:, :K, rows] * 0.9
        given = {"method": method, "draft_logits": law, "lengths": torch.tensor([3, 1, 2, 3, 3])}
        if weightless:
            found.append(verify_logits(sampler, LOGITS[..., rows], its, batch(), 20, **given))
        else:
            found.append(verify(sampler, HIDDEN, its, batch(), 20, **given))
    if weightless and dist.get_world_size() > 1:
        with pytest.raises(RankMismatch, match="token_ids: row 0: must be the same"):
            lengths = torch.full((ROWS,), dist.get_rank())
            verify_logits(sampler, LOGITS[..., rows], its, batch(), 20, lengths=lengths)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_given_logits_are_verified_alike(world_size):
    its = drafts()
    expected = run_ranks(1, _given, its, False)[0]
    for found in run_ranks(world_size, _given, its, True):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    assert expected[0].num_accepted.sum() > 4


def test_the_kernel_takes_given_logits():
    sampler, its = sampler_of("triton"), drafts()[:3, :1]
    params = [SamplingParams(seed=70 + i, **kind) for i, kind in enumerate(KINDS[:2])]
    two = SamplingBatch.from_params(params, vocab_size=V)
    out = verify_logits(sampler, LOGITS[:2, :2].half(), its[:2], two, 20)
    rounded = LOGITS[:2, :2].half().float()
    assert_same(out, verify_logits(sampler_of(), rounded, its[:2], two, 20))


def test_more_logits_than_there_is_room_for_are_refused():
    small = LMHeadSampler(WEIGHT, max_rows=19, backend="torch")
    with pytest.raises(ValueError, match="local_logits: 5 rows × 4 positions exceed max_rows=19"):
        verify_logits(small, LOGITS, drafts(), batch(), 20)


@pytest.mark.parametrize("backend", ["torch", "numba", "triton"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_emits_nothing_for_padding(method, backend):
    """A slot without a request emits nothing either, however likely its drafts are."""
    batch = SamplingBatch.of_slots(3, vocab_size=V)
    batch.put(1, SamplingParams(seed=4))
    logits = torch.randn(3, 2, V, generator=torch.Generator().manual_seed(0))
    drafts, slots = torch.tensor([[3], [2], [1]]), torch.tensor([-1, 1, 9])
    logits[[0, 2], 0, [3, 1]] = 50.0  # drafts that any row would accept
    sampler = LMHeadSampler(torch.empty(V, 0), backend=backend)
    found = verify_logits(sampler, logits, drafts, batch.select(slots), 5, method=method)
    expected = definition.verify(logits, drafts, batch.select(slots), 5, method=method)
    for name in ("token_ids", "num_accepted", "status"):
        assert getattr(found, name).equal(getattr(expected, name)), name
    assert found.token_ids[[0, 2]].eq(-1).all() and found.token_ids[1, 0] >= 0
    assert found.status.tolist() == [Status.OK, Status.OK, Status.BAD_SLOT]


@pytest.mark.parametrize("method", METHODS)
def test_positions_of_a_selection_are_those_of_its_drawn_rows(method):
    """Padding may have any position, and drawn rows one that each of their drafts can have."""
    batch = SamplingBatch.of_slots(3, vocab_size=V)
    batch.put(1, SamplingParams(seed=4))
    rows, last = batch.select(torch.tensor([-1, 1])), 2**63 - 1 - K
    sampler, given = sampler_of(), (HIDDEN[:2], drafts()[:2])
    for position in (last + 1, -1):
        with pytest.raises(ValueError, match=rf"^positions: expected 0 <= .* got {position}"):
            verify(sampler, *given, rows, torch.tensor([0, position]), method=method)
    verify(sampler, *given, rows, torch.tensor([-7, last]), method=method)
    verify(sampler, *given, rows, torch.tensor([2**63 - 1, last]), method=method)


@pytest.mark.parametrize("method", METHODS)
def test_positions_after_the_last_one_of_all_are_refused(method):
    """Plain steps at them are refused, too, so that no draft is ever one of theirs."""
    sampler, last = sampler_of(), 2**63 - 1 - K
    for positions in (last + 1, torch.arange(last + 2 - ROWS, last + 2)):
        told = rf"^positions: expected 0 <= position <= 2\^63 - {K + 1}, .* got {last + 1}"
        with pytest.raises(ValueError, match=told):
            verify(sampler, HIDDEN, drafts(), batch(), positions, method=method)
    verify(sampler, HIDDEN, drafts(), batch(), last, method=method)
    none = drafts()[:, :0]
    verify(sampler, HIDDEN[:, :1], none, batch(), last + K, method=method)
