"""`sample_logits`: the tokens of a call with hidden states, from logits that the caller computed.

Random steps of the fuzz go this way, too; wrong arguments are in `tests.agreement`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support import host_reads
from tests.support.cases import Case
from tests.support.virtual import assert_all_equal, small_tiles
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    Status,
    reference,
    verify,
    verify_logits,
)
from tpsample.agreement.ready_made import FEW_COLUMNS
from tpsample.core.machine import numba_missing

NATIVE = numba_missing() is None
BACKENDS = ("torch", "triton")


def case_of() -> Case:
    """Rows of every kind: greedy, plain, filtered, with controls and logprobs."""
    case = Case.make(203, 6, dtype=torch.float32)
    changes = [
        {},
        {"top_k": 5},
        {"top_p": 0.8, "logprobs": 2},
        {"repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
        {"allowed_token_ids": list(range(0, 203, 3))},
        {},
    ]
    pairs = zip(case.params, changes, strict=True)
    params = [dataclasses.replace(params, **change) for params, change in pairs]
    tokens = [[row, 3, row] for row in range(len(params))]
    return dataclasses.replace(case, params=params, tokens=tokens)


def logits_of(case: Case) -> torch.Tensor:
    return reference.logits(case.hidden_states, case.weight)


def sampler_of(case: Case, backend: str = "torch", **arguments) -> LMHeadSampler:
    """One rank alone."""
    return small_tiles(LMHeadSampler(case.weight, backend=backend, max_rows=24, **arguments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_columns_behind_the_shard_are_never_read(backend, value):
    case = case_of()
    padded = torch.cat([case.weight, torch.full((5, 16), torch.nan)])
    sampler = LMHeadSampler(padded, vocab_size=case.vocab_size, backend=backend, max_rows=24)
    logits = torch.nn.functional.pad(logits_of(case), (0, 5), value=value)
    out = sampler.sample_logits(logits, case.batch, case.positions)
    assert_all_equal([out], case.oracle())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_head_is_not_applied(backend):
    case = Case.make(65, 4, dtype=torch.float32)
    head = {"logit_scale": 3.0, "logit_softcap": 2.0, "bias": torch.arange(65.0).flip(0)}
    sampler = sampler_of(case, backend, **head)
    out = sampler.sample_logits(logits_of(case), case.batch, case.positions, head_applied=True)
    assert_all_equal([out], case.oracle())
    assert_all_equal(  # and a call with hidden states still has it
        [sampler(case.hidden_states, case.batch, case.positions)], case.oracle(**head)
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"logit_softcap": 5.0, "bias": torch.zeros(9)}, "logit_softcap, bias"),
    ],
)
def test_a_head_of_which_logits_may_lack_a_part_is_refused(options, named):
    sampler = LMHeadSampler(torch.zeros(9, 0), backend="torch", **options)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0)], vocab_size=9)
    logits = torch.arange(9.0).unsqueeze(0)
    for call in (
        lambda **how: sampler.sample_logits(logits, batch, 0, **how),
        lambda **how: verify_logits(
            sampler, logits.unsqueeze(1), torch.zeros(1, 0).long(), batch, 0, **how
        ),
    ):
        with pytest.raises(ValueError, match=f"^local_logits: the sampler has {named}, which"):
            call()
        assert call(head_applied=True).token_ids.flatten().tolist() == [8]


@pytest.mark.parametrize(
    ("fields", "softcap"),
    [({}, None), ({"temperature": 0.0}, None), ({"top_p": 0.9}, None), ({"top_k": 5}, 5.0)],
    ids=["plain", "greedy", "top_p", "top_k"],
)
@pytest.mark.parametrize("backend", [*BACKENDS, *(["numba"] if NATIVE else [])])
def test_an_overflow_is_no_token_and_an_infinite_logit_of_the_caller_is_forced(
    backend, softcap, fields
):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(300, 16, generator=generator).half()
    hidden_states = torch.randn(3, 16, generator=generator).half()
    hidden_states[1, 0] = 70000.0  # infinite in fp16
    params = [SamplingParams(**{"seed": row, **fields}) for row in range(3)]
    batch = SamplingBatch.from_params(params, vocab_size=300)
    sampler = LMHeadSampler(weight, backend=backend, logit_softcap=softcap)
    out = sampler(hidden_states, batch, 7)
    assert out.status.tolist() == [Status.OK, Status.NAN, Status.OK]
    logits = reference.logits(hidden_states, weight, logit_softcap=softcap)
    assert torch.equal(out.token_ids, reference.sample(logits, batch, 7).token_ids)
    logits = torch.zeros(3, 300).index_fill_(1, torch.tensor([40, 200]), torch.inf)
    forced = sampler.sample_logits(logits, batch, 7, head_applied=True)
    assert forced.token_ids.tolist() == [40] * 3 and not forced.status.any()


def test_probabilities_are_refused_where_logits_belong():
    batch = SamplingBatch.from_params([SamplingParams(temperature=0)] * 2, vocab_size=65)
    logits = torch.randn(2, 65, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sampler = LMHeadSampler(torch.empty(65, 0), backend="torch")
        with pytest.raises(ValueError, match=r"^local_logits: expected logits, .*pass their log"):
            sampler.sample_logits(logits.softmax(1).to(dtype), batch, 0)
    likely = logits.softmax(1).log()
    for taken in (likely, logits, logits / logits.norm(), logits.sigmoid(), torch.zeros(2, 65)):
        sampler = LMHeadSampler(torch.empty(65, 0), backend="torch")
        out = sampler.sample_logits(taken, batch, 0)
        assert torch.equal(out.token_ids, taken.argmax(dim=1))


@pytest.mark.parametrize("vocab_size", [2, FEW_COLUMNS - 1])
def test_few_logits_may_look_like_probabilities(vocab_size):
    logits = torch.eye(vocab_size)
    params = [SamplingParams(temperature=0)] * vocab_size
    batch = SamplingBatch.from_params(params, vocab_size=vocab_size)
    sampler = LMHeadSampler(torch.empty(vocab_size, 0), backend="torch")
    assert sampler.sample_logits(logits, batch, 0).token_ids.tolist() == [*range(vocab_size)]


def test_an_output_is_written_again_and_logits_may_require_a_gradient():
    case = case_of()
    sampler, logits = sampler_of(case), logits_of(case).requires_grad_()
    out = sampler.sample_logits(logits, case.batch, case.positions)
    out.token_ids.zero_()
    again = sampler.sample_logits(logits, case.batch, case.positions, out=out)
    assert again is out and not out.token_ids.requires_grad
    assert_all_equal([again], case.oracle())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_reads_nothing_of_plain_rows(backend):
    case = Case.make(65, 4)
    batch, logits = case.batch, logits_of(case)
    sampler = sampler_of(case, backend)
    with host_reads.refused():
        out = sampler.sample_logits(logits, batch, case.positions)
    assert_all_equal([out], case.oracle())


def test_a_sampler_without_a_weight_takes_no_hidden_states():
    batch = SamplingBatch.from_params([SamplingParams(seed=1)], vocab_size=9)
    sampler = LMHeadSampler(torch.empty(9, 0))
    token = sampler.sample_logits(torch.arange(9.0).unsqueeze(0) * 100, batch, 0)
    assert token.token_ids.tolist() == [8]
    hidden_states, drafts = torch.empty(1, 0), torch.zeros(1, 0, dtype=torch.int64)
    calls = [
        lambda: sampler(hidden_states, batch, 0),
        lambda: sampler.prompt_logprobs(hidden_states, torch.zeros(1, dtype=torch.int64)),
        lambda: verify(sampler, hidden_states.unsqueeze(1), drafts, batch, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"no weight, lm_head_weight is \[9, 0\]; call"):
            call()


def test_logits_of_other_columns_are_told_in_the_shape_they_came_in():
    sampler = LMHeadSampler(torch.empty(65, 0), backend="torch")
    batch = SamplingBatch.from_params([SamplingParams()] * 3, vocab_size=65)
    told = r"^local_logits: expected fp32, bf16 or fp16 \[{}, 65\] on cpu, .*, got .* \({}, 64\) on"
    with pytest.raises(ValueError, match=told.format("3, 2", "3, 2")):
        verify_logits(sampler, torch.zeros(3, 2, 64), torch.zeros(3, 1).long(), batch, 0)
    with pytest.raises(ValueError, match=told.format("B", "3")):
        sampler.sample_logits(torch.zeros(3, 64), batch, 0)
