"""The host waits for no device where it hands numbers over, and indexes by none of its own lists.

A copy that blocks would wait for a device whose stream is busy. So would the copy that an index by
a list makes. On the device "meta" nothing runs, so copies can be listed on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify
from tpsample.core.tensors import columns_of, tensors_of

V, D = 300, 8
REQUESTS = {
    "plain": {},
    "filters": {"top_p": 0.9, "top_k": 40},
    "logprobs": {"logprobs": 2, "logprob_token_ids": [1, 2]},
    "penalties": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 1.0}},
    "masks": {"bad_words": [[1, 2]], "allowed_token_ids": [1, 2, 3]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [3]},
}


class _Copies(TorchDispatchMode):
    """Notes the copies from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {
            each.name: value for each, value in zip(func._schema.arguments, args, strict=False)
        }
        named |= kwargs or {}
        source, onto = named.get("src", named.get("self")), None
        if func is torch.ops.aten.copy_.default:
            onto = named["self"].device
        if func is torch.ops.aten._to_copy.default:
            onto = named.get("device")
        if onto is not None and source.device.type == "cpu" and torch.device(onto).type == "meta":
            if named.get("non_blocking"):
                self.others += 1
            else:
                self.blocking.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_that_comes_waits_for_nothing(kind):
    batch = SamplingBatch.of_slots(4, vocab_size=V, device="meta")
    so_far = {"prompt_token_ids": [[4, 5]], "output_token_ids": [[6]]}
    request = SamplingParams(seed=1, **REQUESTS[kind])
    with _Copies() as first:  # makes the tables that it needs
        batch.put([1], [request], **so_far)
    with _Copies() as copies:
        batch.put([2], [request], **so_far)
        batch.free([1])
    assert first.others and copies.others
    assert not first.blocking and not copies.blocking


def test_numbers_that_are_handed_over_wait_for_nothing():
    with _Copies() as copies:
        tensors_of([1, 2], device="meta")
        columns_of(bytes(16), 2, device="meta")
    assert copies.others == 2 and not copies.blocking


class _NoLists(TorchFunctionMode):
    """Fails at an index that is a list."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(each, list) for each in index)
        return func(*args, **(kwargs or {}))


def _batch(requests: list[dict[str, Any]], **how: Any) -> SamplingBatch:
    params = [SamplingParams(seed=row, **each) for row, each in enumerate(requests)]
    return SamplingBatch.from_params(params, vocab_size=V, **how)


@pytest.mark.parametrize("fixed_rounds", [False, True])
@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_a_verification_with_filters_in_some_rows_indexes_by_no_list(method, fixed_rounds):
    sampler = LMHeadSampler(torch.randn(V, D), backend="torch")
    batch = _batch([{}, {"top_p": 0.5}, {"top_k": 300}], fixed_rounds=fixed_rounds)
    drafts, hidden = torch.zeros(3, 2, dtype=torch.int64), torch.randn(3, 3, D)
    with _NoLists():
        verify(sampler, hidden, drafts, batch, 5, method=method)


def test_a_step_of_rows_that_go_different_ways_indexes_by_no_list():
    generator = torch.Generator().manual_seed(2)
    sampler = LMHeadSampler(torch.randn(V, D, generator=generator) * 1e-3, backend="torch")
    # Of equal logits under a small top_p some rows are not decided by the first candidates.
    batch = _batch([{"top_k": 3}, {}, {"top_p": 0.9}, {"logprobs": 1}, *[{"top_p": 0.01}] * 12])
    with _NoLists():
        sampler(torch.randn(16, D, generator=generator), batch, 5)
    assert sampler.counters()["second_rounds"]
