"""A sampler over a module reads what the module has now; copies are other samplers, or refused."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations

from tests.support.calls import outcome
from tests.support.ranks import same_on_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference

V, D, ROWS = 64, 16, 24
HIDDEN = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1))
BATCH = SamplingBatch.from_params([SamplingParams(seed=i) for i in range(ROWS)], vocab_size=V)


def _linear(seed: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(D, V, bias=bias)


def _right(module: nn.Linear) -> list[int]:
    logits = reference.logits(HIDDEN, module.weight.detach(), bias=module.bias)
    return reference.sample(logits, BATCH, 3).token_ids.tolist()


def _tokens(sampler: LMHeadSampler) -> list[int]:
    return sampler(HIDDEN, BATCH, 3).token_ids.tolist()


def _assigned(module: nn.Linear) -> None:
    module.weight, module.bias = nn.Parameter(torch.randn(V, D)), nn.Parameter(torch.randn(V))


def _tied(module: nn.Linear) -> None:
    module.weight = nn.Embedding(V, D).weight


REPLACED: dict[str, Callable[[nn.Linear], object]] = {
    "load_state_dict": lambda m: m.load_state_dict(_linear(5).state_dict(), assign=True),
    "assigned": _assigned,
    "tied": _tied,
    "data": lambda m: setattr(m.weight, "data", torch.randn(V, D)),
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "cast there and back": lambda m: m.half().float(),
}


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("backend", ["torch", *long("numba")])
def test_the_next_step_reads_what_took_the_weights_place(way, backend):
    module = _linear(2)
    sampler = LMHeadSampler(module, backend=backend)
    assert _tokens(sampler) == _right(module)
    REPLACED[way](module)
    for _ in range(2):
        assert _tokens(sampler) == _right(module)


def test_what_a_module_has_no_more_is_refused():
    module = _linear(2)
    sampler = LMHeadSampler(module)
    module.bias = None
    told = r"^bias: expected a tensor, got None; give one like that of before, or build"
    with pytest.raises(TypeError, match=told):
        _tokens(sampler)
    without = _linear(2, bias=False)
    sampler = LMHeadSampler(without)
    without.bias = nn.Parameter(torch.randn(V))
    with pytest.raises(ValueError, match=r"^bias: the sampler was built without"):
        _tokens(sampler)


class WithAdapter(nn.Linear):
    """As a head with LoRA: it has a weight, and its logits are more than the product."""

    def __init__(self) -> None:
        super().__init__(D, V)
        self.lora_A = nn.Parameter(torch.randn(2, D))


def test_a_module_that_is_more_than_a_product_is_refused():
    with pytest.raises(TypeError, match="WithAdapter has parameters beside weight and bias, lora_"):
        LMHeadSampler(WithAdapter())
    with pytest.raises(ValueError, match="adds its bias before logit_scale"):
        LMHeadSampler(_linear(2), logit_softcap=30.0)
    LMHeadSampler(_linear(2, bias=False), logit_softcap=30.0)
    with pytest.raises(ValueError, match=r"^bias: Linear brings its own"):
        LMHeadSampler(_linear(2), bias=torch.zeros(V))
    with pytest.raises(ValueError, match=r"reads Linear\.weight in each step; assign that"):
        LMHeadSampler(_linear(2)).refresh(torch.zeros(V, D))


def _wrapped() -> dict[str, str]:
    """Return what is told of each wrapper of torch around a head, and take what is told."""
    alone, told = functools.partial(LMHeadSampler, group="alone", backend="torch"), {}
    compiled: Any = torch.compile(_linear(2))
    told["compiled"] = outcome(lambda: alone(compiled))[1]
    assert _tokens(alone(compiled._orig_mod)) == _right(_linear(2))
    for originals in (True, False):
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(
            _linear(2, bias=False), device_id=cpu, use_orig_params=originals
        )
        told[f"wrapped, {originals}"] = outcome(lambda w=wrapped: alone(w))[1]  # type: ignore[misc]
        told[f"flat, {originals}"] = outcome(lambda w=wrapped: alone(w.module))[1]  # type: ignore[misc]
        with FullyShardedDataParallel.summon_full_params(wrapped):
            assert _tokens(alone(wrapped.module)) == _right(_linear(2, bias=False))
    return told


def test_the_way_to_a_head_that_torch_has_wrapped_is_told():
    told = same_on_ranks(2, _wrapped)
    assert told.pop("compiled").endswith("torch.compile wraps the head; pass its ._orig_mod")
    for name, text in told.items():
        assert "inside FSDP's summon_full_params" in text, (name, text)
        assert ("pass its .module, and build" in text) == name.startswith("wrapped"), (name, text)


class Quantised(nn.Linear):
    """As a head of bitsandbytes or of a training with fake quantisation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(hidden_states, self.weight.round())


def test_a_linear_layer_with_a_forward_of_its_own_is_refused_and_the_ways_out_work():
    head = Quantised(D, V, bias=False)
    told = r"^lm_head_weight: Quantised has a forward of its own, .* or its weight and bias="
    with pytest.raises(TypeError, match=told):
        LMHeadSampler(head)
    logits = head(HIDDEN).detach()
    out = LMHeadSampler(torch.empty(V, 0), backend="torch").sample_logits(logits, BATCH, 3)
    assert out.token_ids.tolist() == reference.sample(logits, BATCH, 3).token_ids.tolist()
    assert _tokens(LMHeadSampler(head.weight, backend="torch")) == _right(head)
    head.__class__ = nn.Linear  # type: ignore[assignment]
    as_accelerate = functools.update_wrapper(functools.partial(head.forward), head.forward)
    for forward, warned in ((as_accelerate, 0), (lambda hidden_states: hidden_states, 1)):
        head.forward = forward  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert _tokens(LMHeadSampler(head, backend="torch")) == _right(head)
        assert ["forward hooks, test_a_linear" in str(each.message) for each in told] == [
            1
        ] * warned


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_no_step_calls_are_warned_of_where_the_sampler_is_built(kind):
    head = _linear(2)
    getattr(head, kind)(print)
    told = r"^lm_head_weight: Linear has forward hooks, print, .* or pass its weight and bias="
    with pytest.warns(UserWarning, match=told) as warned:
        sampler = LMHeadSampler(head, backend="torch")
    assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _tokens(sampler) == _right(head)
        LMHeadSampler(head.weight, bias=head.bias, backend="torch")


def test_what_is_fixed_cannot_be_set():
    sampler = LMHeadSampler(_linear(2).weight)
    with pytest.raises(AttributeError, match=r"weight: is fixed .*refresh\(lm_head_weight\)"):
        sampler.weight = torch.zeros(V, D)
    for name in [*inspect.signature(LMHeadSampler).parameters][1:]:
        with pytest.raises(AttributeError, match=f"{name}: is fixed .* build a new sampler"):
            setattr(sampler, name, None)
    with pytest.raises(
        AttributeError, match=r"no logit_scale; .* built with is in sampler\.settings"
    ):
        _ = sampler.logit_scale


class Model(nn.Module):
    """A model that keeps its sampler."""

    def __init__(self, over_module: bool) -> None:
        super().__init__()
        self.lm_head = _linear(2)
        head = self.lm_head
        given = {} if over_module else {"bias": head.bias}
        self.sampler = LMHeadSampler(head if over_module else head.weight, backend="torch", **given)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.sampler(hidden_states, BATCH, 3).token_ids


@pytest.mark.parametrize("over_module", [True, False])
def test_a_copy_of_a_model_samples_with_its_own_weights(over_module):
    """Compiled, too: each sampler has a number of its own there."""
    model = Model(over_module)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for of in (model, other, compiled):
        right = _right((of if of is model else other).lm_head)
        assert of(HIDDEN).tolist() == right
    assert _right(model.lm_head) != _right(other.lm_head)


def test_pickles_and_shallow_copies_are_refused_by_name():
    sampler = LMHeadSampler(_linear(2))
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^LMHeadSampler: is neither pickled nor copied"):
            copied(sampler)


def _of_two_ranks() -> list[bool]:
    """Return whether a step is right over a sharded module, before and after a change."""
    rank = dist.get_rank()
    shard = VocabShard.even(V, rank, 2)
    whole, own, found = _linear(3), nn.Linear(D, V // 2), []
    with torch.no_grad():
        own.weight.copy_(whole.weight[shard.start : shard.stop])
        own.bias.copy_(whole.bias[shard.start : shard.stop])
    sampler = LMHeadSampler(own, shard=shard, backend="torch")
    found.append(_tokens(sampler) == _right(whole))
    whole = _linear(4)
    state = {name: its[shard.start : shard.stop].clone() for name, its in whole.named_parameters()}
    own.load_state_dict(state, assign=True)
    found.append(_tokens(sampler) == _right(whole))
    with pytest.raises(TypeError, match="build another over the copied weight on every rank"):
        copy.deepcopy(sampler)

    sharded: Any = _linear(5, bias=False)
    expected = _right(sharded)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its hooks are torch's own, which move the weight alone
        sampler = LMHeadSampler(sharded, backend="torch")
    found.append(_tokens(sampler) == expected)
    sharded.unshard()
    sharded.reshard()
    found.append(_tokens(sampler) == expected)
    return found


def test_a_module_of_two_ranks_and_one_that_fsdp_shards():
    assert same_on_ranks(2, _of_two_ranks) == [True] * 4
