"""The LM head under vLLM: what is kept, what is handed on, and logprobs of prompts."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import vllm_fakes as fakes
from tests.support.vllm_fakes import D, Request, V
from tests.support.vllm_steps import HIDDEN, WEIGHT, expected, rows_of, step_v1, v1, v2
from tpsample import UnsupportedParameter, reference
from tpsample.agreement import construction
from tpsample.core.machine import numba_missing
from tpsample.integrations.vllm_head import only_processor


@pytest.mark.parametrize("make", [v1, v2])
def test_the_log_says_who_samples(make, caplog):
    with caplog.at_level(logging.INFO, logger="vllm"):
        make()
    (record,) = caplog.records
    assert record.name.startswith("vllm.tpsample.")  # vLLM shows no others at this level
    assert record.message.startswith("tpsample 0.") and "samples, not vLLM: LMHeadSampler(" in (
        record.message
    )


@pytest.mark.skipif(numba_missing() is not None, reason="needs the extra cpu")
@pytest.mark.parametrize("make", [v1, v2])
def test_a_server_on_a_cpu_samples_by_native_kernels(make, caplog, monkeypatch):
    """Even where the engine has its own kernels interpreted."""
    monkeypatch.setattr(construction, "interpreted", lambda: True)
    with caplog.at_level(logging.INFO, logger="vllm"):
        make()
    assert "backend='numba'" in caplog.text


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("method", [None, fakes.Int8Method()], ids=["fused", "logits"])
def test_prompt_logprobs_of_both_runners_are_the_definitions(mode, method):
    """More positions than rows fit into a step, and in V2 a prompt in two chunks."""
    hidden = torch.randn(9, D, generator=torch.Generator().manual_seed(6))
    prompt = [int(i) for i in torch.randint(V, (10,), generator=torch.Generator().manual_seed(7))]
    logits = reference.logits(hidden, WEIGHT)
    values = logits if mode.endswith("logits") else logits.log_softmax(dim=1)
    ids = torch.tensor(prompt[1:])

    def check(found) -> None:
        assert torch.equal(found.logprob_token_ids[:, 0].long(), ids)
        assert torch.equal(found.logprob_token_ids[:, 1:].long(), values.topk(2).indices)
        at = found.logprob_token_ids.long()
        assert torch.allclose(found.logprobs, values.gather(1, at).float(), atol=1e-4)
        rank = (values >= values.gather(1, ids.unsqueeze(1))).sum(dim=1)
        assert torch.equal(found.selected_token_ranks.long(), rank)

    first = v1(logprobs_mode=mode, method=method)
    handed = first.model.compute_logits(hidden)
    scores = handed if mode.endswith("logits") else first.sampler.compute_logprobs(handed)
    check(first.sampler.gather_logprobs(scores, 2, ids))

    second = v2(logprobs_mode=mode, method=method)
    fakes.v2_request(second, "p", 5, Request(prompt_logprobs=2), prompt)
    for computed, count in ((0, 4), (4, 6)):
        batch = SimpleNamespace(
            req_ids=["a", "p"],
            idx_mapping_np=np.array([1, 5]),
            num_computed_prefill_tokens_np=np.array([2, computed]),
            prefill_len_np=np.array([2, 10]),
            query_start_loc_np=np.array([0, 1, 1 + count]),
        )
        states = second.sampler.req_states
        part = torch.cat([HIDDEN[:1], hidden, HIDDEN[:1]])[
            [0, *range(1 + computed, 1 + computed + count)]
        ]
        found = second.prompt_logprobs_worker.compute_prompt_logprobs(
            second.model.compute_logits,
            part,
            batch,
            states.all_token_ids.gpu,
            None,
            states.prompt_len.np,
        )
        assert set(found) == ({"p"} if computed else set())
    check(found["p"])


@pytest.mark.parametrize(
    ("method", "processor", "fused", "names", "head"),
    [
        (fakes.Int8Method(), {}, False, "ab", {}),
        (None, {"scale": 0.5, "soft_cap": 3.0}, False, "b", {"logit_softcap": 3.0}),
        (None, {"scale": 0.3}, True, "ab", {"logit_scale": 0.3}),
        (None, {"soft_cap": 2.0}, True, "ab", {"logit_softcap": 2.0}),
    ],
    ids=["quantised", "scaled behind the soft-cap", "scaled", "soft-capped"],
)
def test_a_head_that_is_no_product_is_vllms_own_without_its_gather(
    method, processor, fused, names, head
):
    runner = v1(processor=fakes.Processor(**processor), method=method)
    assert runner.sampler.steps.head.fused == fused
    found = step_v1(runner, [*names], rows_of(names)).sampled_token_ids[:, 0].tolist()
    assert found == [expected(name, [], **head) for name in names]


def test_what_was_handed_on_comes_back_once():
    runner = v1()
    head = runner.sampler.steps.head
    handed = runner.model.compute_logits(HIDDEN[:2])
    assert torch.equal(head.kept.consume(handed), HIDDEN[:2])
    with pytest.raises(RuntimeError, match="with nothing kept"):
        head.kept.consume(handed)
    runner.model.compute_logits(HIDDEN[:2])
    with pytest.raises(RuntimeError, match=r"got \[3, 0\] with 2 rows kept"):
        head.kept.consume(torch.empty(3, 0))


def test_a_weight_that_was_replaced_is_followed():
    runner, other = v1(), v1()
    changed = 1 - runner.model.lm_head.weight.detach()
    other.model.lm_head.weight.data.copy_(changed)
    expected = step_v1(other, ["a"], rows_of("a"))
    runner.model.lm_head.weight = nn.Parameter(changed)
    assert step_v1(runner, ["a"], rows_of("a")).sampled_token_ids.tolist() == (
        expected.sampled_token_ids.tolist()
    )
    runner.model.lm_head.weight = nn.Parameter(changed.bfloat16())
    with pytest.raises(ValueError, match="lm_head_weight: expected torch"):
        step_v1(runner, ["a"], rows_of("a"))


def test_a_model_has_one_logits_processor():
    runner = fakes.runner()
    assert only_processor(runner.model, fakes.Processor) is runner.model.processor
    with pytest.raises(UnsupportedParameter, match="expected one Processor, ModuleList has 2"):
        only_processor(nn.ModuleList([fakes.Processor(), fakes.Processor()]), fakes.Processor)
    wrapped = nn.Module()
    wrapped.base_layer = fakes.Processor()  # as vLLM wraps the head's, and layers of other kinds
    with pytest.raises(UnsupportedParameter, match=r"--enable-lora: .*--lora-target-modules q_p"):
        only_processor(nn.ModuleList([wrapped]), fakes.Processor)
    layer = nn.Module()
    layer.base_layer = nn.Linear(1, 1)
    attached = nn.ModuleList([layer, fakes.Processor()])
    assert only_processor(attached, fakes.Processor) is attached[1]
    runner.model.processor.logits_as_input = True
    with pytest.raises(UnsupportedParameter, match="makes its logits before"):
        fakes.head_of(runner)
