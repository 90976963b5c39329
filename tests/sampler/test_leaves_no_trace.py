"""A step changes nothing of the caller's: neither its tensors, nor their storages, nor a mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tpsample import LMHeadSampler, SampleOutput, SamplingBatch, SamplingParams, verify

V, D, B = 300, 24, 2
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "temperature": 2.0},
    "logprobs": {"logprobs": 2, "min_p": 0.01},
    "controls": {"repetition_penalty": 1.5, "allowed_token_ids": list(range(90))},
}
OTHERS = ("logits", "int8", "tensors", "out", "verify", "prompt")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an output, and of what is in it."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def modes() -> list[object]:
    """Return the modes of this thread and process that a step must leave."""
    return [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.random.initial_seed(),
        bool(torch.tensor(1e-40) * 1 == 0),
        torch.get_float32_matmul_precision(),
    ]


def took(tensor: Tensor) -> list[object]:
    """All of a tensor that a step must leave."""
    storage, of_bits = tensor.untyped_storage(), tensor.detach().contiguous().view(torch.uint8)
    its = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.requires_grad, tensor.grad
    return [*its, tensor._version, storage.resizable(), storage.nbytes(), of_bits.tolist()]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("kind", [*FIELDS, *OTHERS])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_step_leaves_the_callers_tensors_and_modes(backend, kind, flushed):
    g = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(V, D, generator=g).bfloat16(), torch.randn(V, generator=g)
    hidden = torch.randn(B, D, generator=g).bfloat16()
    its = {"weight": weight, "bias": bias, "hidden": hidden, "positions": torch.arange(B)}
    params = [SamplingParams(seed=i, **FIELDS.get(kind, {})) for i in range(B)]
    rows: Any = SamplingBatch.from_params(params, vocab_size=V)
    if kind == "controls":
        its["mask"] = torch.full((B, -(-V // 32)), -1, dtype=torch.int32)
        its["forced"] = torch.tensor([-1, 7])
        rows.grammar_bitmask, rows.forced_token_ids = its["mask"], its["forced"]
    if kind == "tensors":
        columns = {"temperature": torch.ones(B), "seed": torch.arange(B), "top_p": torch.ones(B)}
        rows, its = SamplingBatch.from_tensors(vocab_size=V, **columns), its | columns
    if kind in ("plain", "verify"):
        weight.requires_grad_()
    screening = "int8" if kind == "int8" else None
    if screening and backend == "torch":
        pytest.skip('backend "torch" screens nothing')
    sampler = LMHeadSampler(weight, bias=bias, backend=backend, screening=screening)
    out: Any = None
    if kind == "out":
        out = SampleOutput.empty(torch.zeros(B, dtype=torch.int64), None)
    if kind == "logits":
        its["logits"] = torch.randn(B, V, generator=g)
    if kind == "verify":
        its |= {"drafts": torch.tensor([[3], [4]]), "hidden": hidden.unsqueeze(1).repeat(1, 2, 1)}
    if kind == "prompt":
        its["ids"] = torch.tensor([3, 5])
    torch.set_flush_denormal(flushed)
    try:
        before, around = {name: took(each) for name, each in its.items()}, modes()
        for _ in range(2):
            if kind == "logits":
                found: Any = sampler.sample_logits(
                    its["logits"], rows, its["positions"], head_applied=True
                )
            elif kind == "verify":
                found = verify(sampler, its["hidden"], its["drafts"], rows, its["positions"])
            elif kind == "prompt":
                found = sampler.prompt_logprobs(hidden, its["ids"], top=2)
            else:
                found = sampler(hidden, rows, its["positions"], out=out)
        assert modes() == around
        for name, each in its.items():
            assert took(each) == before[name], name
    finally:
        torch.set_flush_denormal(False)
    if backend == "numba":
        for tensor in tensors_in(found):
            assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_weight_without_its_storage_is_refused_until_that_is_back(backend):
    """Sharded training frees the storage of a weight, and fills it again before it is used."""
    weight, hidden = torch.randn(V, D), torch.randn(B, D)
    sampler = LMHeadSampler(weight, backend=backend)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0.0)] * B, vocab_size=V)
    expected, kept = sampler(hidden, batch, 0).token_ids.tolist(), weight.clone()
    size = weight.untyped_storage().nbytes()
    for _ in range(3):
        weight.untyped_storage().resize_(0)
        with pytest.raises((ValueError, RuntimeError), match="storage"):
            sampler(hidden, batch, 0)
        other = torch.zeros(V * D)  # so that the storage comes back elsewhere
        weight.untyped_storage().resize_(size)
        weight.copy_(kept)
        assert sampler(hidden, batch, 0).token_ids.tolist() == expected
        del other
