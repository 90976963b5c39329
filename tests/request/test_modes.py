"""Masks, graphs and ranks under the modes of torch, which `test_fuzz` has around every call."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.mistakes import HIDDEN, WEIGHT, batch_of, half, tokens
from tests.support.ranks import run_ranks
from tests.support.small_heads import D, V, head, plain
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    TopKTrace,
    reference,
    verify,
)
from tpsample.request.selection import Selection
from tpsample.speculative import reference as definition


def test_a_mask_may_be_assigned_under_inference_mode():
    hidden_states, weight = head(3)
    sampler = LMHeadSampler(weight, backend="torch")
    batch = SamplingBatch.from_params(plain(2), vocab_size=V, max_rows=3)
    with torch.inference_mode():
        batch.forced_token_ids = torch.tensor([3, 4])
    batch.append(sampler(hidden_states[:2], batch, 0).token_ids)
    batch.add(SamplingParams(seed=2, presence_penalty=1.0))
    batch.forced_token_ids = None
    fresh = SamplingBatch.from_params(
        [*plain(2), SamplingParams(seed=2, presence_penalty=1.0)], vocab_size=V
    )
    tokens = [sampler(hidden_states, each, 1).token_ids for each in (batch, fresh)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda its: pickle.loads(pickle.dumps(its))], ids=["copied", "loaded"]
)
def test_what_is_copied_or_loaded_under_inference_mode_serves_outside(copied):
    """Everything that later calls write to: rows with their tokens so far, slots and a trace."""
    hidden_states, weight = head(3)
    sampler = LMHeadSampler(weight, backend="torch")
    params = [SamplingParams(seed=i, presence_penalty=1.0, logprobs=2) for i in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=4)
    batch.forced_token_ids = torch.tensor([-1, 7, -1])
    slots = SamplingBatch.of_slots(4, vocab_size=V)
    slots.put([0, 1, 2], params)
    rows = slots.select(torch.tensor([2, -1, 0]))
    with torch.inference_mode():
        trace = TopKTrace(3, 4, 2)
    columns = {"temperature": torch.ones(3), "seed": torch.arange(3), "top_p": torch.ones(3) / 2}

    def use(
        batch: SamplingBatch, slots: SamplingBatch, rows: Selection, trace: TopKTrace
    ) -> list[list[int]]:
        """Step, append and record; then change rows, numbers and masks, and step again."""
        tokens = []
        for position in range(2):
            out = sampler(hidden_states, batch, position)
            trace.record(out)
            batch.append(out)
            its = sampler(hidden_states, rows, position)
            rows.append(its)
            tokens += [out.token_ids.tolist(), its.token_ids.tolist()]
            rows = slots.select(torch.tensor([1, 2, 0]), out=rows)
        batch.temperature[0], batch.seed[2] = 0.5, 9
        batch.forced_token_ids = None
        batch.add(SamplingParams(seed=8, top_p=0.5))
        batch.permute([3, 1, 2, 0])
        batch.drop(1)
        slots.put(3, params[0])
        again = slots.select(torch.arange(3), out=rows)
        tokens += [sampler(hidden_states, each, 5).token_ids.tolist() for each in (batch, again)]
        return [*tokens, *trace.tensors()["token_ids"].tolist()]

    with torch.inference_mode():
        others = copied((batch, slots, rows, trace))
        built = SamplingBatch.from_tensors(vocab_size=V, **columns)
    assert use(*others) == use(batch, slots, rows, trace)
    built.temperature[:] = 0.0
    built.update(1, SamplingParams(seed=1))
    sampler(hidden_states, built, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("screening", [None, "int8"])
def test_a_sampler_may_be_built_and_called_under_autocast(dtype, screening):
    hidden_states, weight = (each.to(dtype) for each in head(2))
    batch = SamplingBatch.from_params(plain(2), vocab_size=V)
    expected = LMHeadSampler(weight, screening=screening)(hidden_states, batch, 0).token_ids
    with torch.autocast("cpu", torch.bfloat16):
        found = LMHeadSampler(weight, screening=screening)(hidden_states, batch, 0).token_ids
    assert torch.equal(found, expected)


def test_steps_with_gradients_leave_nothing_behind():
    """A model's own weight requires a gradient; the graph of a step must not outlive it."""
    hidden_states, weight = head(4)
    weight.requires_grad_(True)
    hidden_states.requires_grad_(True)
    bias = torch.zeros(V, requires_grad=True)
    sampler = LMHeadSampler(weight, bias=bias, backend="torch")
    params = [
        SamplingParams(seed=1, top_p=0.8),
        SamplingParams(seed=2, logprobs=2, presence_penalty=1.0),
        SamplingParams(seed=3, top_k=300, top_p=0.9),
        SamplingParams(seed=4),
    ]
    batch = SamplingBatch.from_params(params, vocab_size=V)

    def graph_nodes() -> int:
        with warnings.catch_warnings():  # some objects warn when they are looked at
            warnings.simplefilter("ignore")
            return sum("Backward" in type(x).__name__ for x in gc.get_objects())

    before = graph_nodes()
    drafts = torch.zeros(4, 1, dtype=torch.int64)
    states = hidden_states.unsqueeze(1).expand(4, 2, D)
    for step in range(3):
        out = sampler(hidden_states, batch, step)
        assert not any(
            tensor.requires_grad
            for tensor in (*sampler.local._scratch._memory.values(), out.logprobs.values)
        )
        for method in ("coupled", "rejection", "block"):
            verify(sampler, states, drafts, batch, step, method=method)
        assert not sampler.prompt_logprobs(hidden_states, torch.arange(4)).values.requires_grad
    assert graph_nodes() == before


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9, "logprobs": 2}, {"top_k": 5, "min_p": 0.1}])
def test_the_definition_takes_logits_with_gradients(fields):
    logits, drafts = reference.logits(*head(2)), torch.zeros(1, 1, dtype=torch.int64)
    two, one = (
        SamplingBatch.from_params(
            [SamplingParams(seed=i, **fields) for i in range(rows)], vocab_size=V
        )
        for rows in (2, 1)
    )

    def tokens_of(logits: torch.Tensor) -> list[list[int]]:
        outs = [reference.sample(logits, two, 3)]
        for method in ("coupled", "rejection", "block"):
            outs.append(definition.verify(logits[None], drafts, one, 3, method=method))
        return [out.token_ids.tolist() for out in outs]

    expected = tokens_of(logits)
    assert tokens_of(logits.clone().requires_grad_()) == expected


def test_calls_that_torch_records_are_made_outside_compiled_or_exported():
    hidden_states, weight = head(2)
    sampler = LMHeadSampler(weight, backend="torch")
    batch = SamplingBatch.from_params(plain(2), vocab_size=V)
    rows = torch.vmap(lambda row: row * 2)(hidden_states)
    expected = sampler(rows, batch, 0).token_ids

    class Step(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return sampler(rows, batch, 0).token_ids

    exported = torch.export.export(Step(), (rows,)).module()
    compiled = torch.compile(Step(), backend="aot_eager", fullgraph=True)
    for found in (exported(rows), compiled(rows)):
        assert torch.equal(found, expected)


def _exchanged(exchange: str) -> list[int]:
    batch = batch_of()
    with torch.device("meta"):
        return tokens(LMHeadSampler(half(dist.get_rank()), exchange=exchange), batch)


@pytest.mark.parametrize("exchange", ["collective", "peer"])
def test_ranks_exchange_the_same_words(exchange):
    right = reference.sample(HIDDEN @ WEIGHT.T, batch_of(), 0).token_ids.tolist()
    assert run_ranks(2, _exchanged, exchange) == [right, right]
