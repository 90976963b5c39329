"""Scores of a trainer: those of the step that drew the tokens, and gradients of float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.ranks import run_ranks
from tpsample import (
    LMHeadSampler,
    RankMismatch,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    verify,
)
from tpsample.backends import room_of
from tpsample.backends.torch_ import passes
from tpsample.training import KeptLogprobs, KeptTokens, call, kept_logprobs, products
from tpsample.training import logprobs as module

V, D, ROWS = 331, 24, 24
KINDS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.8},
    {},
    {"top_k": 1},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 5},
)
HEADS: tuple[dict[str, Any], ...] = (
    {},
    {"logit_scale": 0.7},
    {"logit_softcap": 3.0, "logit_scale": 2.0},
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Case = tuple[Tensor, Tensor, Tensor, KeptTokens, Tensor]


def _pairs(firsts: Sequence[Any], seconds: Sequence[Any]) -> Iterator[Any]:
    """Yield all pairs; those in which each value of the longer list stands once are not long."""
    for (row, first), (column, second) in itertools.product(enumerate(firsts), enumerate(seconds)):
        marks = () if row % len(seconds) == column else pytest.mark.long
        yield pytest.param(first, second, id=f"{first}-{second}", marks=marks)


@pytest.fixture(params=["torch", "triton", "numba"])
def backend(request, monkeypatch):
    monkeypatch.setattr(call, "default_backend", lambda device: request.param)


def _numbers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(ROWS, D, generator=generator)
    return states.to(dtype), torch.randn(V, D, generator=generator).to(dtype)


def _rollout(dtype: torch.dtype, **head: float) -> tuple[Case, Tensor, Tensor]:
    """Return arguments of a score, and the values and entropies of the step that drew."""
    states, weight = _numbers(dtype)
    params = [
        SamplingParams(
            temperature=0.6 + 0.3 * (row % 4),
            seed=row,
            logprobs=0,
            logprobs_mode="processed_logprobs",
            **KINDS[row % len(KINDS)],
        )
        for row in range(ROWS)
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=V)
    with LMHeadSampler(weight, group="alone", backend="torch", **head) as sampler:
        out = sampler(states, batch, 5)
    assert out.logprobs is not None
    temperature = torch.tensor([each.temperature for each in params])
    case = (states, weight, out.token_ids, KeptTokens.of_step(out.kept), temperature)
    return case, out.logprobs.values[:, 0], out.logprobs.entropies


@pytest.mark.parametrize("whole", [False, True])
def test_the_tokens_of_a_verification_are_scored_as_they_were_drawn(whole):
    _, weight = _numbers()
    states = torch.randn(ROWS, 3, D, generator=torch.Generator().manual_seed(4))
    kinds = KINDS if whole else [{"top_k": 5}, {"top_p": 0.7}]
    params = [
        SamplingParams(
            seed=row,
            logprobs=0,
            logprobs_mode="processed_logprobs",
            **kinds[row % len(kinds)],
        )
        for row in range(ROWS)
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=V)
    with LMHeadSampler(weight, group="alone", backend="torch", max_rows=3 * ROWS) as sampler:
        drafts = sampler(states[:, 0], batch, 5).token_ids.unsqueeze(1).repeat(1, 2)
        out = verify(sampler, states, drafts, batch, 5)
    emitted = out.token_ids.flatten() >= 0
    assert 0 < emitted.sum() < len(emitted) and out.logprobs is not None
    for rows in (emitted, emitted.nonzero().flatten().flip(0)):
        kept = KeptTokens.of_step(out.kept, rows)
        scores = kept_logprobs(
            states.flatten(0, 1)[rows], weight, out.token_ids.flatten()[rows], kept, 1.0
        )
        assert torch.equal(scores.logprobs, out.logprobs.values[rows, 0])


def _definition(case: Case, head: dict[str, float]) -> KeptLogprobs:
    """Score by a softmax over all ids with the others masked, in the dtype of the weight."""
    states, weight, token_ids, kept, temperature = case
    logits = states @ weight.T * head.get("logit_scale", 1.0)
    if (cap := head.get("logit_softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    mask = kept.whole.unsqueeze(1).repeat(1, len(weight))
    mask[torch.arange(len(kept)).repeat_interleave(kept.sizes), kept.token_ids] = True
    logits = (logits / temperature.double().unsqueeze(1)).masked_fill(~mask, -torch.inf)
    log_p = logits.log_softmax(dim=1)
    entropies = -(log_p.exp() * log_p.masked_fill(~mask, 0)).sum(dim=1)
    return KeptLogprobs(log_p.gather(1, token_ids.unsqueeze(1)).squeeze(1), entropies)


def _gradients(scores: KeptLogprobs, *leaves: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(8)
    factors = torch.randn(2, len(scores.logprobs), generator=generator, dtype=torch.float64)
    total = (scores.logprobs * factors[0]).sum() + (scores.entropies * factors[1]).sum()
    return torch.autograd.grad(total, leaves)


def _off(found: Tensor, expected: Tensor) -> float:
    """Return the error of gradients relative to their size."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("head", "dtype"), _pairs(HEADS, DTYPES))
def test_values_are_bit_for_bit_those_of_the_step(head, dtype, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 3 * V)  # several parts of rows that kept every id
    case, values, entropies = _rollout(dtype, **head)
    assert case[3].whole.any() and (case[3].sizes == 1).any() and (case[3].sizes > 20).any()
    scores = kept_logprobs(*case, group="alone", **head)
    assert torch.equal(scores.logprobs, values) and torch.equal(scores.entropies, entropies)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    states, weight, token_ids, kept, temperature = case
    sets = kept.token_ids.split(kept.sizes.tolist())
    others = [None if kept.whole[row] else sets[row].flip(0) for row in order]
    again = kept_logprobs(
        *(states[order], weight, token_ids[order], KeptTokens.from_lists(others)),
        temperature[order],
        group="alone",
        **head,
    )
    assert torch.equal(again.logprobs, values[order]), "another order of rows and ids"


class _Largest(TorchDispatchMode):
    """Notes the most 8-byte numbers that a tensor has which an operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.element_size() == 8:
                self.most = max(self.most, each.numel())
        return result


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sparse", [False, True])
def test_memory_grows_with_the_sets_and_not_with_the_head(sparse):
    """No float64 tensor has all numbers of the weight, nor those of all pairs at once."""
    pick = torch.Generator().manual_seed(0)
    states, weight = torch.randn(200, 256, generator=pick), torch.randn(2500, 256, generator=pick)
    sets = torch.randint(2500, (200, 8), generator=pick)
    kept = KeptTokens.from_lists([sorted({*row}) for row in sets.tolist()])
    leaves = [each.requires_grad_() for each in (states, weight)]
    with _Largest() as largest:
        scores = kept_logprobs(*leaves, sets[:, 0], kept, 1.0, group="alone", sparse=sparse)
        scores.logprobs.sum().backward()
    assert 200 * 256 < largest.most <= passes.tile_elements(states.device) < 8 * 200 * 256
    assert weight.grad is not None and weight.grad.is_sparse == sparse


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("head", "sparse"), _pairs(HEADS, [False, True]))
def test_gradients_are_those_of_a_masked_softmax_in_float64(head, sparse, monkeypatch):
    # several parts of the weight's rows
    monkeypatch.setattr(module, "AT_ONCE", 7 * D)
    monkeypatch.setattr(module, "tile_elements", lambda device: 7 * D)
    case, _, _ = _rollout(torch.float32, **head)
    states, weight, token_ids, kept, temperature = case
    if sparse:
        rows = (~kept.whole).nonzero().flatten()
        sets = kept.token_ids.split(kept.sizes.tolist())
        kept = KeptTokens.from_lists([sets[row] for row in rows.tolist()])
        states, token_ids, temperature = states[rows], token_ids[rows], temperature[rows]
    leaves = [each.clone().requires_grad_() for each in (states, weight)]
    scores = kept_logprobs(
        *leaves, token_ids, kept, temperature, group="alone", sparse=sparse, **head
    )
    found = _gradients(scores, *leaves)
    doubles = [each.double().requires_grad_() for each in (states, weight)]
    truth = _definition((*doubles, token_ids, kept, temperature), head)
    expected = _gradients(truth, *doubles)
    assert (scores.logprobs - truth.logprobs).abs().max() < 3e-6
    assert found[1].is_sparse == sparse
    listed = kept.token_ids.unique()
    if sparse:
        assert torch.equal(found[1].indices()[0], listed)
    assert _off(found[0], expected[0]) < 1e-6
    assert _off(found[1].to_dense() if sparse else found[1], expected[1]) < 1e-6


@pytest.mark.usefixtures("backend")
def test_numbers_that_lie_in_columns_have_the_same_gradients():
    found = []
    for lies in (Tensor.clone, lambda numbers: numbers.T.contiguous().T):
        states, weight, *rest = _rollout(torch.float32)[0]
        leaves = [lies(each).requires_grad_() for each in (states, weight)]
        found.append(_gradients(kept_logprobs(*leaves, *rest, group="alone"), *leaves))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_another_default_device_changes_no_sets():
    with torch.device("meta"):
        kept = KeptTokens.from_lists([[7, 3], None, torch.tensor([5], device="cpu")])
    assert kept.offsets.tolist() == [0, 2, 2, 3]
    assert kept.token_ids.tolist() == [7, 3, 5]
    assert kept.whole.tolist() == [False, True, False]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_gradients_agree_with_small_differences(head):
    states, weight = (each[:9].double().requires_grad_() for each in _numbers())
    kept = KeptTokens.from_lists([[3, 5, 8], None, [1]] * 3)
    score = functools.partial(kept_logprobs, group="alone", **head)
    token_ids = torch.tensor([5, 2, 1] * 3)
    assert torch.autograd.gradcheck(
        lambda *leaves: score(*leaves, token_ids, kept, 0.8), (states, weight), fast_mode=True
    )


def _on_shards(case: Case, shards: list[VocabShard]) -> tuple[Tensor, ...]:
    states, weight, *rest = case
    shard = shards[dist.get_rank()]
    padded = torch.cat([weight[shard.start : shard.stop], torch.ones(2, D)])
    leaves = states.clone().requires_grad_(), padded.requires_grad_()
    scores = kept_logprobs(*leaves, *rest, shard=shard)
    return *map(torch.Tensor.detach, scores), *_gradients(scores, *leaves)


@pytest.mark.parametrize("bounds", [(0, 170, V), (0, 5, 5, V)], ids=["two", "an empty one"])
def test_ranks_together_score_and_learn_as_one(bounds):
    case, values, entropies = _rollout(torch.float32)
    alone = [each.clone().requires_grad_() for each in case[:2]]
    scores = kept_logprobs(*alone, *case[2:], group="alone")
    of_states, of_weight = _gradients(scores, *alone)
    shards = [VocabShard(*each) for each in itertools.pairwise(bounds)]
    for shard, found in zip(shards, run_ranks(len(shards), _on_shards, case, shards), strict=True):
        assert torch.equal(found[0], values) and torch.equal(found[1], entropies)
        torch.testing.assert_close(found[2], of_states, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[3][: len(shard)], of_weight[shard.start : shard.stop])
        assert not found[3][len(shard) :].any(), "padding has no gradient"


def _beside_a_sampler(case: Case) -> tuple[list[Tensor], list[list[int]]]:
    """Return values, and the tokens that another thread draws meanwhile over the same group."""
    states, weight, *rest = case
    shard = VocabShard.even(V, dist.get_rank(), 2)
    own, values = weight[shard.start : shard.stop], []
    sampler = LMHeadSampler(own, vocab_size=V, shard=shard, backend="torch")
    params = [SamplingParams(seed=row) for row in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    with ThreadPoolExecutor(1) as other:
        drawn = other.submit(
            lambda: [sampler(states, batch, at).token_ids.tolist() for at in range(60)]
        )
        for _ in range(20):
            leaf = states.clone().requires_grad_()
            scores = kept_logprobs(leaf, own, *rest, shard=shard)
            _gradients(scores, leaf)
            values.append(scores.logprobs.detach())
    return values, drawn.result()


def test_a_thread_scores_while_another_one_draws_over_the_same_group():
    case, expected, _ = _rollout(torch.float32)
    first, second = run_ranks(2, _beside_a_sampler, case)
    for values, drawn in (first, second):
        assert all(torch.equal(each, expected) for each in values)
        assert drawn == first[1]


def _with_dtensor(case: Case) -> tuple[Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.nn.Parameter(distribute_tensor(case[1], mesh, [Shard(0)]))
    states = case[0].clone().requires_grad_()
    scores = kept_logprobs(states, weight, *case[2:])
    of_states, of_weight = _gradients(scores, states, weight)
    with pytest.raises(ValueError, match="rank 0: sparse: a DTensor has a dense gradient"):
        kept_logprobs(states, weight, *case[2:], sparse=True)
    whole: Tensor = of_weight.full_tensor()  # type: ignore[attr-defined]
    return scores.logprobs.detach(), of_states, whole


def test_a_dtensor_names_group_and_shard_and_has_its_gradient():
    case, values, _ = _rollout(torch.float32)
    alone = [each.clone().requires_grad_() for each in case[:2]]
    expected = _gradients(kept_logprobs(*alone, *case[2:], group="alone"), *alone)
    for found in run_ranks(2, _with_dtensor, case):
        assert torch.equal(found[0], values)
        torch.testing.assert_close(found[1:], expected, rtol=1e-6, atol=1e-6)


def _in_a_larger_job(case: Case) -> tuple[list[Tensor], list[str]]:
    """Return values over tensor-parallel groups [0, 1] and [2, 3], and alone; and what is told."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, weight, rest = dist.get_rank(), case[1], case[2:]
    own, other = groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    shard = VocabShard.even(V, rank % 2, 2)
    rows = weight[shard.start : shard.stop]
    states = case[0] + rank // 2  # the replicas score texts of their own
    found = [kept_logprobs(states, rows, *rest, shard=shard, group=groups[rank // 2]).logprobs]
    if rank == 1:  # and no other rank calls
        found.append(kept_logprobs(*case, group="alone").logprobs)
    mesh = init_device_mesh("cpu", (2, 2))
    for placed in ((Replicate(), Shard(0)), (Shard(0), Replicate())):
        placed_weight = distribute_tensor(weight, mesh, placed)
        found.append(kept_logprobs(torch.zeros_like(states), placed_weight, *rest).logprobs)
    with pytest.raises(ValueError) as told:
        kept_logprobs(states, rows, *rest, shard=shard, group=own if rank > 1 else other)
    texts = [str(told.value)]
    with pytest.raises(RankMismatch) as differs:
        kept_logprobs(states, distribute_tensor(weight, mesh, [Shard(0)] * 2), *rest)
    return found, [*texts, str(differs.value)]


def test_groups_within_a_larger_job_score_by_themselves():
    case, values, _ = _rollout(torch.float32)
    score = functools.partial(kept_logprobs, group="alone")
    shifted = score(case[0] + 1, *case[1:]).logprobs
    zeros = score(torch.zeros_like(case[0]), *case[1:]).logprobs
    for rank, (found, texts) in enumerate(run_ranks(4, _in_a_larger_job, case)):
        alone = [values] * (rank == 1)
        expected = [values if rank < 2 else shifted, *alone, zeros, zeros]
        assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))
        assert texts[0] == "group: this process is not a member of the group"
        assert "rank 0: lm_head_weight: expected Shard(0) on one axis of the mesh" in texts[1]


def test_a_row_with_a_logit_that_is_no_number_has_no_score():
    states, weight = _numbers()
    states[1, 0] = torch.inf
    kept = KeptTokens.from_lists([[3, 5], [3, 5], None])
    scores = kept_logprobs(
        states[:3], weight, torch.tensor([3, 3, 3]), kept, torch.ones(3), group="alone"
    )
    assert scores.logprobs.isnan().tolist() == [False, True, False]
    assert scores.entropies.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("which", ["token_ids", "temperature", "offsets", "kept", "whole"])
def test_what_was_given_must_not_be_written_to_before_backward(which):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (3, 50))
    kept, temperature = KeptTokens.from_lists([[1, 2, 3]] * 3), torch.tensor([0.5, 1.0, 2.0])
    token_ids = torch.tensor([1, 2, 3])
    found = kept_logprobs(hidden.requires_grad_(), weight, token_ids, kept, temperature)
    its = {"token_ids": token_ids, "temperature": temperature, "kept": kept.token_ids}
    its |= {"offsets": kept.offsets, "whole": kept.whole}
    its[which].copy_(its[which].clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.logprobs.sum().backward()


def test_what_was_given_may_be_of_inference_mode():
    hidden, weight = torch.randn(2, 8, requires_grad=True), torch.randn(50, 8)
    with torch.inference_mode():
        token_ids, kept = torch.tensor([1, 3]), KeptTokens.from_lists([[1, 2], [3]])
    kept_logprobs(hidden, weight, token_ids, kept, 1.0).logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad[0].any()


def test_a_second_derivative_is_refused_and_a_kept_graph_is_not():
    hidden, weight = torch.randn(1, 8, requires_grad=True), torch.randn(50, 8)
    arguments = weight, torch.tensor([1]), KeptTokens.from_lists([[1, 2]]), 1.0
    value = kept_logprobs(hidden, *arguments).logprobs.sum()
    with pytest.raises(RuntimeError, match=r"no second derivatives; .* without create_graph"):
        torch.autograd.grad(value, hidden, create_graph=True)
    first, again = (torch.autograd.grad(value, hidden, retain_graph=True)[0] for _ in range(2))
    assert first.any() and torch.equal(first, again)


def test_a_batch_of_gradients_is_refused():
    hidden = torch.randn(2, 8, requires_grad=True)
    kept = KeptTokens.from_lists([[1, 2], [3, 1]])
    values = kept_logprobs(hidden, torch.randn(50, 8), torch.tensor([1, 3]), kept, 1.0).logprobs
    each = torch.eye(2, dtype=values.dtype)
    with pytest.raises(RuntimeError, match=r"^kept_logprobs takes no batch of gradients in backw"):
        torch.autograd.grad(values, hidden, each, is_grads_batched=True)


@pytest.mark.usefixtures("backend")
def test_a_compiled_trainer_scores_outside_of_its_graph():
    case, _, _ = _rollout(torch.float32)
    found = []

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return kept_logprobs(2 * states, weight, *case[2:], group="alone").logprobs.sum()

    for way in (loss, torch.compile(loss, backend="eager")):
        leaves = [each.clone().requires_grad_() for each in case[:2]]
        found.append([way(*leaves), *torch.autograd.grad(way(*leaves), leaves)])
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))


def test_kernels_are_compiled_before_the_ranks_meet(monkeypatch):
    case, _, _ = _rollout(torch.float32)
    room, order = room_of("torch"), []

    def noted(name: str, function: Any) -> Any:
        return lambda *given: order.append(name) or function(*given)

    both = "pair_products", "add_weighted_rows"
    ready = replace(room, **{name: noted(name, getattr(room, name)) for name in both})
    monkeypatch.setattr(call, "room_of", lambda backend: ready)
    monkeypatch.setattr(call, "agreed", noted("the ranks meet", call.agreed))
    call._ready_room.cache_clear()
    for _ in range(2):
        kept_logprobs(*case, group="alone")
    call._ready_room.cache_clear()
    assert order == [*both, "the ranks meet", both[0], "the ranks meet", both[0]]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_rows_that_kept_every_id_are_summed_in_fp32_on_a_gpu(head, monkeypatch):
    case, values, entropies = _rollout(torch.float32, **head)
    rows = case[3].whole.nonzero().flatten()
    for each in (module, products):
        monkeypatch.setattr(each, "sums_in", lambda numbers: torch.float32)
    monkeypatch.setattr(products, "tile_elements", lambda device: 7 * D)
    leaves = [each.clone().requires_grad_() for each in case[:2]]
    scores = kept_logprobs(*leaves, *case[2:], group="alone", **head)
    assert torch.allclose(scores.logprobs, values, rtol=0, atol=2e-6) and len(rows)
    assert torch.allclose(scores.entropies, entropies, rtol=0, atol=2e-6)
    assert not torch.equal(scores.logprobs[rows], values[rows])
    found = _gradients(scores, *leaves)
    doubles = [each.double().requires_grad_() for each in case[:2]]
    expected = _gradients(_definition((*doubles, *case[2:]), head), *doubles)
    assert all(_off(its, exact) < 2e-6 for its, exact in zip(found, expected, strict=True))
