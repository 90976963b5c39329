"""Tensors whose memory was freed, or has other numbers, are refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import CALLS, B, D, call, head_of, outcome, step
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler

OF_CALLS = [
    *(("step", name) for name in ("hidden_states", "positions")),
    ("sample_logits", "local_logits"),
    *(("prompt_logprobs", name) for name in ("hidden_states", "next_token_ids")),
    *(("verify", name) for name in ("hidden_states", "draft_token_ids", "draft_logits", "lengths")),
    ("sample_draft", "draft_logits"),
]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one, whose memory was freed."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


def _freed_on_one(backend: str) -> list[tuple[str, str]]:
    """Each tensor freed on rank 1, every time followed by a step that is right on both."""
    rank, module = dist.get_rank(), torch.nn.Linear(D, len(head_of(0)))
    module.weight.data = head_of(rank)
    module.bias.data.zero_()
    sampler = LMHeadSampler(module, backend=backend)  # type: ignore[arg-type]
    sampler_of_logits = LMHeadSampler(head_of(rank), backend=backend)  # type: ignore[arg-type]
    expected, found = step(sampler), []

    def told(function: Callable[[], Any]) -> None:
        found.append(outcome(function))
        assert step(sampler) == expected

    for name, argument in OF_CALLS:
        right = CALLS[name][argument].right
        right = torch.zeros(B).long() if argument == "positions" else right
        changes = {argument: freed(right) if rank else right}
        told(lambda n=name, c=changes: call(sampler_of_logits, n, **c))
    for parameter in (module.weight, module.bias):
        storage, numbers = parameter.untyped_storage(), parameter.detach().clone()
        if rank:
            storage.resize_(0)
        found.append(outcome(lambda: step(sampler)))
        storage.resize_(numbers.nbytes)
        parameter.data.copy_(numbers)
        assert step(sampler) == expected
    told(lambda: LMHeadSampler(freed(head_of(1)) if rank else head_of(0)))
    return found


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_tensor_that_was_freed_on_one_rank_is_named_on_every_rank(backend):
    if backend == "numba":
        pytest.importorskip("numba", reason="needs the extra cpu")
    found = same_on_ranks(2, _freed_on_one, backend, group_timeout_s=20)
    names = [*(argument for _, argument in OF_CALLS), "lm_head_weight", "bias", "lm_head_weight"]
    for name, (kind, text) in zip(names, found, strict=True):
        assert kind == "RankMismatch", text
        assert text.startswith(f"rank 1: {name}: its storage has 0 of "), text


def test_numbers_that_are_still_to_be_negated_are_refused():
    sampler = LMHeadSampler(head_of(0), backend="torch")
    for name, argument in (("step", "hidden_states"), ("sample_logits", "local_logits")):
        put_off = torch._neg_view(CALLS[name][argument].right)
        with pytest.raises(ValueError, match=rf"^{argument}: torch .* call \.resolve_neg\(\)"):
            call(sampler, name, **{argument: put_off})
    with pytest.raises(ValueError, match=r"^lm_head_weight: torch .* call \.resolve_neg\(\)"):
        LMHeadSampler(torch._neg_view(head_of(0)))
