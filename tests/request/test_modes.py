"""The caller's modes of torch enter no token, and no step keeps an autograd graph."""

import functools
import gc
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.mistakes import HIDDEN, WEIGHT, batch_of, half, tokens
from tests.support.random_requests import SURROUNDINGS
from tests.support.ranks import run_ranks
from tests.support.small_heads import D, V, head, plain
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, reference, verify

MODES = SURROUNDINGS | {"meta": lambda: torch.device("meta")}


def _story(backend: str, inside: str, outside: str) -> list[list[int]]:
    """Tokens of a batch that is built, stepped and changed under two modes in turn, with the bits
    of the logprobs."""
    first, second = MODES[inside], MODES[outside]
    params = [
        SamplingParams(seed=1, repetition_penalty=1.3, logprobs=1),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(seed=3, bad_words=[[5, 6]], min_tokens=2, stop_token_ids=[3]),
        SamplingParams(allowed_token_ids=[1, 2], seed=5, logit_bias={1: 0.1}, min_p=0.013),
    ]
    hidden_states, weight = head(8)
    drafts = torch.zeros(5, 1, dtype=torch.int64)
    weight.requires_grad_(True)
    with first():
        how = {"backend": backend, "max_rows": 16, "desync_every": 2, "logit_softcap": 7.1}
        sampler = LMHeadSampler(weight, **how)
        batch = SamplingBatch.from_params(params, vocab_size=V, max_rows=5, device="cpu")
    tokens = []
    for number, mode in enumerate((second, first, second, first)):
        with mode():
            out = sampler(hidden_states[:4] * 1.0, batch, number)
            tokens.append([*out.token_ids.tolist(), *out.logprobs.values.nan_to_num(7).tolist()])
        with (first if number % 2 else second)():
            batch.append(out.token_ids)
    with second():
        batch.add(SamplingParams(presence_penalty=1.0, seed=6))
    with first():
        states = hidden_states[[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]].view(5, 2, D)
        tokens += verify(sampler, states, drafts, batch, 9).token_ids.tolist()
        batch.permute([4, 3, 2, 1, 0])
    with second():
        batch.drop([0, 1])
        tokens.append(sampler(hidden_states[:3], batch, 10).token_ids.tolist())
    return tokens


@functools.cache
def _story_with_gradients() -> list[list[int]]:
    return _story("torch", "grad", "grad")


@pytest.mark.parametrize(
    ("backend", "inside", "outside"),
    [("torch", *pair) for pair in itertools.permutations(MODES, 2)]
    + [("triton", "inference", "grad"), ("triton", "grad", "inference"), ("triton", "meta", "grad")]
    + [("numba", "bfloat16", "grad"), ("numba", "meta", "grad"), ("numba", "inference", "meta")],
)
def test_sampler_batch_and_steps_may_each_be_under_another_mode(backend, inside, outside):
    assert _story(backend, inside, outside) == _story_with_gradients()


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


def _exchanged(exchange: str) -> list[int]:
    batch = batch_of()
    with torch.device("meta"):
        return tokens(LMHeadSampler(half(dist.get_rank()), exchange=exchange), batch)


@pytest.mark.parametrize("exchange", ["collective", "peer"])
def test_ranks_exchange_the_same_words(exchange):
    right = reference.sample(HIDDEN @ WEIGHT.T, batch_of(), 0).token_ids.tolist()
    assert run_ranks(2, _exchanged, exchange) == [right, right]
