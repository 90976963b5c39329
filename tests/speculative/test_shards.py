"""Rejection and block verification on gloo ranks: bitwise the oracle's, nothing gathered."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.support.cases import own_sampler
from tests.support.fields import OTHER_FILTERS, one_with
from tests.support.filtered import V, kinds_of_logits
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, Status, verify, verify_logits
from tpsample import reference as plain_reference
from tpsample.speculative import VerifyOutput, reference

K = 3
METHODS = ("rejection", "block")
REQUESTS: tuple[dict, ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 7},
    {"top_k": 300, "top_p": 0.9, "temperature": 1.5},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "ties": "keep", "filter_order": "joint"},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.1, "filter_order": "min_p_last", "temperature": 1.5},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "top_p": 0.9},
    {"allowed_token_ids": list(range(0, V, 3)), "logit_bias": {3: 5.0, 6: 4.0}},
    {"bad_words": [[i] for i in range(0, V, 5)], "min_tokens": 2, "stop_token_ids": [1, 2]},
    {"frequency_penalty": 0.4},
    *one_with(OTHER_FILTERS),
)


class Problem:
    """Rows of exact logits: hidden states are one-hot, and each kind is a column of the head.

    Drafts are draws from the drafter's logits, the target's argmax, or other tokens; ragged.
    """

    def __init__(
        self, kinds: list[torch.Tensor], copies: int = 2, requests: tuple = REQUESTS
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.stack(kinds, dim=1)
        vocab_size, count = self.weight.shape
        each = [request for request in requests for _ in range(copies)]
        self.params = [SamplingParams(**request, seed=40 + i) for i, request in enumerate(each)]
        rows = len(self.params)
        kind = torch.randint(0, count, (rows, K + 1), generator=generator)
        self.hidden_states = torch.eye(count)[kind]
        self.logits = self.weight.T[kind]
        noise = torch.randn(rows, K, vocab_size, generator=generator)
        self.draft = self.logits[:, :K] + noise
        drawn = self.draft.flatten(0, 1).softmax(dim=1).multinomial(1, generator=generator)
        best = self.logits[:, :K].argmax(dim=2)
        anything = torch.randint(0, vocab_size, (rows, K), generator=generator)
        which = torch.rand(rows, K, generator=generator)
        drafts = torch.where(which < 0.5, drawn.view(rows, K), best)
        drafts = torch.where(which > 0.9, anything, drafts)
        lengths = torch.randint(0, K + 3, (rows, 1), generator=generator)
        self.drafts = drafts.where(torch.arange(K) < lengths, -1)
        self.positions = 100 + torch.arange(rows)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def batch(self) -> SamplingBatch:
        return SamplingBatch.from_params(self.params, vocab_size=self.vocab_size)

    def sampler(self, **options: Any) -> LMHeadSampler:
        """This rank's."""
        return own_sampler(self.weight, **{"even": False, "max_rows": 1024} | options)

    def verify(
        self, sampler: LMHeadSampler, method: str, draft: torch.Tensor | None, batch: Any = None
    ) -> VerifyOutput:
        """Verify by this rank's columns of a drafter's logits."""
        if draft is not None:
            draft = draft[:, :, sampler.shard.start : sampler.shard.stop]
        given = self.hidden_states, self.drafts, batch or self.batch, self.positions
        return verify(sampler, *given, method=method, draft_logits=draft)

    def oracle(self, method: str, draft: torch.Tensor | None) -> VerifyOutput:
        return reference.verify(
            self.logits, self.drafts, self.batch, self.positions, method=method, draft_logits=draft
        )


def differing(out: VerifyOutput, expected: VerifyOutput) -> list[str]:
    return [
        name
        for name in ("num_accepted", "token_ids", "status")
        if not torch.equal(getattr(out, name), getattr(expected, name))
    ]


def _verify(problem: Problem) -> dict[tuple, VerifyOutput]:
    outputs = {}
    for even in (True, False):
        options = {"backend": "numba"} if even else {"exchange": "p2p", "chunks": 3}
        sampler = problem.sampler(even=even, **options)
        for method in METHODS:
            for draft in (problem.draft,) if even else (problem.draft, None):
                found = problem.verify(sampler, method, draft)
                outputs[even, method, draft is None] = found
    return outputs


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem(list(kinds_of_logits().values()))


@pytest.mark.parametrize("world_size", [1, 3, *long(2, 4, 8)])
def test_every_rank_count_emits_the_oracles_tokens(world_size, problem):
    oracle = {
        (method, certain): problem.oracle(method, None if certain else problem.draft)
        for method in METHODS
        for certain in (True, False)
    }
    for outputs in run_ranks(world_size, _verify, problem):
        for (even, method, certain), out in outputs.items():
            expected = oracle[method, certain]
            assert not differing(out, expected), (even, method, certain)
            emitted = torch.arange(K + 1) <= expected.num_accepted.unsqueeze(1)
            assert (out.status == Status.OK).all()
            assert torch.equal(out.token_ids >= 0, emitted)
            assert 0 < expected.num_accepted.float().mean() < K


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_rows_that_stop_within_a_block_recover_at_its_coefficient(backend):
    """Small laws, where many drafts are accepted with a coefficient below 1."""
    generator = torch.Generator().manual_seed(2)
    kinds = [torch.randn(16, generator=generator) for _ in range(4)]
    problem = Problem(kinds, copies=400, requests=({},))
    sampler = problem.sampler(max_rows=400 * (K + 1), backend=backend)
    out = problem.verify(sampler, "block", problem.draft)
    assert not differing(out, problem.oracle("block", problem.draft))


def _verify_by_kernel(problem: Problem, exchange: str) -> dict[str, VerifyOutput]:
    sampler = problem.sampler(backend="triton", exchange=exchange, max_rows=128)
    outputs = {
        method: problem.verify(sampler, method, None if method == "coupled" else problem.draft)
        for method in ("coupled", *METHODS)
    }
    sampler.check()
    sampler.close()
    return outputs


@pytest.mark.parametrize(("world_size", "exchange"), [(1, "auto"), (2, "peer")])
def test_the_kernel_in_the_interpreter_stores_the_same_laws(world_size, exchange):
    """On several ranks it writes the words to the peers itself."""
    generator = torch.Generator().manual_seed(9)
    kinds = [torch.randn(61, generator=generator) for _ in range(16)]
    problem = Problem(kinds, copies=1, requests=({}, {"temperature": 0.0}, {"top_k": 7}))
    for outputs in run_ranks(world_size, _verify_by_kernel, problem, exchange):
        for method, out in outputs.items():
            expected = problem.oracle(method, None if method == "coupled" else problem.draft)
            assert not differing(out, expected), method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("certain", [True, False], ids=["one-hot", "logits"])
def test_other_rows_and_padding_of_k_change_nothing(problem, method, certain):
    sampler = problem.sampler()
    draft = None if certain else problem.draft
    expected = problem.oracle(method, draft)

    order = torch.randperm(len(problem.params), generator=torch.Generator().manual_seed(1))[:11]
    batch = SamplingBatch.from_params([problem.params[row] for row in order], vocab_size=V)
    hidden_states = torch.cat(
        [problem.hidden_states[order], torch.full((11, 2, problem.weight.shape[1]), math.nan)], 1
    )
    drafts = torch.cat([problem.drafts[order], torch.tensor([[-1, 3]]).expand(11, 2)], dim=1)
    if draft is not None:
        draft = torch.cat([draft[order], torch.full((11, 2, V), math.nan)], dim=1)
    out = verify(
        sampler,
        hidden_states,
        drafts,
        batch,
        problem.positions[order],
        method=method,
        draft_logits=draft,
    )
    assert torch.equal(out.num_accepted, expected.num_accepted[order])
    assert torch.equal(out.token_ids[:, : K + 1], expected.token_ids[order])
    assert (out.token_ids[:, K + 1 :] == -1).all() and (out.status == Status.OK).all()


SPECIAL = SamplingBatch.from_params(SamplingParams(seed=2, top_p=0.9).fork(20), vocab_size=50)


def _special(*given: torch.Tensor, backend: str = "torch") -> list[VerifyOutput]:
    sampler = own_sampler(torch.zeros(50, 1), even=False, backend=backend)
    own = slice(sampler.shard.start, sampler.shard.stop)
    logits, drafts, draft = given[0][:, :, own], given[1], given[2][:, :, own]
    return [
        verify_logits(sampler, logits, drafts, SPECIAL, 7, method=method, draft_logits=draft)
        for method in METHODS
    ]


def special_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NaN, nothing left, two forced tokens, one token left; a drafter's NaN and -inf."""
    special = torch.zeros(4, 1, 2, 50)
    special[0, ..., 31] = math.nan
    special[1] = -math.inf
    special[2, ..., [7, 44]] = math.inf
    special[3, ..., :49] = -math.inf
    logits = special.repeat(1, 5, 1, 1).flatten(0, 1)
    drafts = torch.tensor([[3], [7], [49], [-1], [9]]).repeat(4, 1)
    draft = torch.zeros(20, 1, 50)
    draft[::5, 0, 3] = -math.inf  # a draft that its drafter cannot have drawn
    draft[4::5, 0, 20] = math.nan
    return logits, drafts, draft


@pytest.mark.parametrize("world_size", [1, 3])
def test_special_rows(world_size):
    logits, drafts, draft = special_rows()
    expected = [
        reference.verify(logits, drafts, SPECIAL, 7, method=method, draft_logits=draft)
        for method in METHODS
    ]
    for outs in run_ranks(world_size, _special, logits, drafts, draft):
        for out, wanted in zip(outs, expected, strict=True):
            assert not differing(out, wanted)
    nan, empty = int(Status.NAN), int(Status.EMPTY)
    for out in expected:
        status, accepted = out.status.view(4, 5).tolist(), out.num_accepted.view(4, 5).tolist()
        assert status == [[nan] * 5, [empty] * 5, *[[0, 0, 0, 0, nan]] * 2]
        assert accepted == [[0] * 5, [0] * 5, [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
        only = out.token_ids.amax(dim=1).view(4, 5).tolist()
        assert only == [[-1] * 5, [-1] * 5, [7, 7, 7, 7, -1], [49, 49, 49, 49, -1]]


@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_special_rows_by_kernels(backend):
    given = special_rows()
    for by_kernels, plain in zip(_special(*given, backend=backend), _special(*given), strict=True):
        assert not differing(by_kernels, plain)


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_the_emitted_tokens(problem, method):
    asked = {"logprobs": 2, "logprobs_mode": "processed_logprobs"}
    params = [dataclasses.replace(request, **asked) for request in problem.params]
    params[::3] = problem.params[::3]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    out = problem.verify(problem.sampler(), method, problem.draft, batch)
    assert not differing(out, problem.oracle(method, problem.draft))
    drafted = batch._with_drafts(problem.drafts)
    emitted = out.token_ids.flatten()
    expected = plain_reference.logprobs(problem.logits.flatten(0, 1), drafted, emitted)
    found = out.logprobs.values
    shown = torch.tensor([request.logprobs is not None for request in params])
    assert torch.equal(found.isnan(), expected.values.isnan())
    assert found[(emitted >= 0) & shown.repeat_interleave(K + 1)].isfinite().any()
    torch.testing.assert_close(found, expected.values, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_rows_that_first_words_decide_are_of_the_emitted_tokens(problem, method, mode):
    """The tokens that a plain step would draw among these words are others."""
    asked = {"top_k": 6, "logprobs": 2, "logprobs_mode": mode}
    params = [SamplingParams(seed=request.seed, **asked) for request in problem.params]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    out = problem.verify(problem.sampler(), method, problem.draft, batch)
    emitted = out.token_ids.flatten()
    drafted = batch._with_drafts(problem.drafts)
    expected = plain_reference.logprobs(problem.logits.flatten(0, 1), drafted, emitted)
    there = emitted >= 0
    assert there.any() and torch.equal(out.logprobs.token_ids[there], expected.token_ids[there])
    near = {"rtol": 0, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(out.logprobs.values, expected.values, **near)
