"""Inputs of the tests of filters and logprobs: exact logits of many kinds, a grid of requests."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.cases import own_shard
from tests.support.fields import OTHER_FILTERS, requests_with, with_others
from tpsample import (
    LMHeadSampler,
    Logprobs,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    VocabShard,
    reference,
)

V = 1200
TOP_K = (0, 1, 2, 20, 50, 256, 1000, V)
TOP_P = (1e-6, 0.1, 0.9, 0.95, 0.99, 1.0)
MIN_P = (0.0, 0.05, 0.5, 1.0)
TEMPERATURES = (1.0, 0.6, 3.0, 0.2, 1.5, 0.0, 1.0)


def kinds_of_logits() -> dict[str, torch.Tensor]:
    """Finite fp32 logits [V] of different shapes."""
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(V, generator=generator)
    normal = torch.randn(V, generator=generator)
    spike = torch.zeros(V)
    spike[701] = 30.0
    return {
        "zipf": -1.3 * (1 + shuffled).double().log().float(),
        "normal": 2.5 * normal,
        "all-equal": torch.full((V,), -7.0),
        "two-valued": torch.where(normal > 0, 1.0, 0.0),
        "spike": spike,
        "bf16": (3 * normal).bfloat16().float(),
        "wide": 1e4 * normal,
        "ramp-in-shards": torch.linspace(0, 4, V),
    }


def filter_requests(turn: int = 0) -> list[dict[str, Any]]:
    """Every top_k × top_p × min_p, in every order of the filters that can matter to them, some with
    other filters: another `turn` has others. Each other filter also stands alone and beside top_p,
    where no further one can hide it.
    """
    requests = []
    for top_k, top_p, min_p in itertools.product(TOP_K, TOP_P, MIN_P):
        orders = ["sequential"]
        if top_p < 1 and 0 < top_k < V:
            orders.append("joint")
        if top_p < 1 and min_p > 0:
            orders.append("min_p_last")
        for order in orders:
            requests.append({"top_k": top_k, "top_p": top_p, "min_p": min_p, "filter_order": order})
    requests = with_others(requests, turn)
    others = requests_with(OTHER_FILTERS)
    return [*requests, *others, *({**each, "top_p": 0.9} for each in others)]


def grid(turn: int = 0) -> list[SamplingParams]:
    """The `filter_requests`, with temperatures and ties that each `turn` draws anew."""
    params, pick = [], random.Random(turn)
    for i, request in enumerate(filter_requests(turn)):
        params.append(
            SamplingParams(
                temperature=pick.choice(TEMPERATURES),
                **request,
                ties=pick.choice(("exact", "keep", "exact")),
                seed=900 + i,
            )
        )
    return params


class Rows:
    """Rows of exact logits: hidden states are one-hot, and each kind is a column of the head.

    `logits` is what the oracle sees; a bias of -inf masks tokens. `options` are the batch's.
    """

    def __init__(
        self,
        kinds: list[torch.Tensor],
        params: list[SamplingParams],
        *,
        bias: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        self.weight = torch.stack(kinds, dim=1)
        self.bias, self.options = bias, options
        self.params = params * len(kinds)
        self.hidden_states = torch.eye(len(kinds)).repeat_interleave(len(params), dim=0)
        self.positions = 11 + torch.arange(len(self.params))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def logits(self) -> torch.Tensor:
        logits = self.weight.T.repeat_interleave(len(self.params) // self.weight.shape[1], dim=0)
        return logits if self.bias is None else logits + self.bias

    @property
    def batch(self) -> SamplingBatch:
        return SamplingBatch.from_params(self.params, vocab_size=self.vocab_size, **self.options)

    def oracle(self, num_samples: int | None = None) -> SampleOutput:
        """Return what every sampler must return."""
        return reference.sample(self.logits, self.batch, self.positions, num_samples=num_samples)

    def kept_mask(self) -> torch.Tensor:
        """The oracle's kept sets."""
        return reference.kept_mask(self.logits, self.batch)

    def head(self, shard: VocabShard) -> dict:
        """The arguments of the sampler that hold one rank's rows of the head."""
        return {
            "lm_head_weight": self.weight[shard.start : shard.stop],
            "bias": None if self.bias is None else self.bias[shard.start : shard.stop],
            "vocab_size": self.vocab_size,
            "shard": shard,
            "max_rows": 4 * len(self.params),
            "backend": "torch",
        }

    def sampler(self, **options: Any) -> LMHeadSampler:
        """The sampler of this rank, or of all ids where there is no process group."""
        return LMHeadSampler(**self.head(own_shard(self.vocab_size, even=False)) | options)

    def step(self, num_samples: int | None = None, **options: Any) -> SampleOutput:
        """Return what this rank draws."""
        how = {"num_samples": num_samples}
        return self.sampler(**options)(self.hidden_states, self.batch, self.positions, **how)


def steps(cases: Sequence[Rows], num_samples: int | None = None) -> list[SampleOutput]:
    """Return what this rank draws of each."""
    return [rows.step(num_samples) for rows in cases]


def assert_same(found: SampleOutput, expected: SampleOutput) -> None:
    """The tokens, statuses and logprobs of two steps are the same."""
    wrong = (found.token_ids != expected.token_ids).nonzero().tolist()
    assert not wrong, f"rows {wrong[:9]}: {found.token_ids}, expected {expected.token_ids}"
    assert torch.equal(found.status, expected.status)
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        assert_same_logprobs(found.logprobs, expected.logprobs)


def assert_same_logprobs(found: Logprobs, expected: Logprobs, tolerance: float = 2e-6) -> None:
    """The ids and ranks are the same, and the values are near."""
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.ranks, expected.ranks)
    near = {"rtol": 0, "atol": tolerance, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(found.values, expected.values, **near)
    torch.testing.assert_close(found.entropies, expected.entropies, **near)


def masked(start: int, stop: int) -> torch.Tensor:
    """A bias that masks the ids [start, stop)."""
    bias = torch.zeros(V)
    bias[start:stop] = -math.inf
    return bias
