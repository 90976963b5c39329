"""A weight that changes between two steps: the next one reads the new one, or raises.

A weight keeps its tensor in four WAYS; the fifth is to assign another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import same_on_ranks
from tests.support.tiers import thinned
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    reference,
    verify,
)

V, D, ROWS = 211, 16, 6
STALE = r"lm_head_weight: changed after .* call sampler.refresh\(\) on every rank"


def _in_place(given: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        given.copy_(new)


def _in_inference_mode(given: Tensor, new: Tensor) -> None:
    with torch.inference_mode():
        given.data.copy_(new)


WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": _in_place,
    "in place through .data": lambda given, new: given.data.copy_(new),
    ".data = new": lambda given, new: setattr(given, "data", new.clone()),
    "inference mode": _in_inference_mode,
}
"""How the numbers of a weight change that stays the same tensor."""


def head_of(seed: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(seed)
    head = nn.Linear(D, V, bias=bias)
    head.weight.data *= 8
    return head


def batch_of() -> SamplingBatch:
    kinds: Sequence[dict[str, float]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logprobs": 1},
    ]
    params = [SamplingParams(seed=i, **kind) for i, kind in enumerate(kinds)]
    return SamplingBatch.from_params(params, vocab_size=V)


def expected(head: nn.Linear, hidden_states: Tensor, position: int) -> list[int]:
    logits = reference.logits(hidden_states, head.weight.detach())
    if head.bias is not None:
        logits = logits + head.bias.detach()
    return reference.sample(logits, batch_of(), position).token_ids.tolist()


@pytest.mark.parametrize(
    ("change", "screening", "made_by"),
    thinned(
        [*WAYS, "assign=True"],
        [None, "int8"],
        [("numba", "plain"), ("numba", "inference mode"), ("triton", "plain")],
        one_in=2,
    ),
)
def test_the_next_step_reads_the_new_weight_or_raises(change, screening, made_by):
    backend, made_in = made_by
    with torch.inference_mode(made_in != "plain"):
        head = head_of(1)
    options = {"screening": screening, "backend": backend, "max_rows": 16}
    sampler, batch = LMHeadSampler(head.weight, **options), batch_of()
    hidden_states = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(3))
    drafts = torch.zeros(ROWS, 1, dtype=torch.int64)
    assert sampler(hidden_states, batch, 1).token_ids.tolist() == expected(head, hidden_states, 1)
    for step in range(2, 4):
        # Elsewhere torch makes a tensor that is of neither mode, and refuses to read it.
        with torch.inference_mode(made_in != "plain"):
            new = head_of(step).weight.detach()
            if change in WAYS:
                WAYS[change](head.weight, new)
            else:
                head.load_state_dict(head.state_dict() | {"weight": new}, assign=True)
        if screening is not None and change != "assign=True":
            with pytest.raises(ValueError, match=STALE):
                sampler(hidden_states, batch, step)
            with pytest.raises(ValueError, match=STALE):
                verify(sampler, hidden_states.unsqueeze(1).repeat(1, 2, 1), drafts, batch, step)
            # Calls that read no copy go on, above all those that ranks make together to recover.
            logits = reference.logits(hidden_states, head.weight.detach())
            found = sampler.sample_logits(logits, batch, step).token_ids.tolist()
            assert found == expected(head, hidden_states, step)
            sampler.prompt_logprobs(hidden_states, torch.arange(ROWS))
            sampler.check()
            sampler.reset()
            memory = sampler.local.copy.quantised.data_ptr()
            sampler.refresh()
            assert sampler.local.copy.quantised.data_ptr() == memory
        if change == "assign=True":
            sampler.refresh(head.weight)
        found = sampler(hidden_states, batch, step).token_ids.tolist()
        assert found == expected(head, hidden_states, step)
        logprobs = sampler.prompt_logprobs(hidden_states, torch.arange(ROWS)).values[:, 0]
        logits = reference.logits(hidden_states, head.weight.detach())
        truth = logits.double().log_softmax(1).diagonal()
        torch.testing.assert_close(logprobs, truth, atol=1e-5, rtol=0)


def test_a_bias_is_followed_too():
    head = head_of(1, bias=True)
    sampler, hidden_states = LMHeadSampler(head.weight, bias=head.bias), torch.randn(ROWS, D)
    sampler(hidden_states, batch_of(), 1)
    head.bias.data = 9 * torch.randn(V)
    found = sampler(hidden_states, batch_of(), 1).token_ids.tolist()
    assert found == expected(head, hidden_states, 1)
    head.bias = nn.Parameter(9 * torch.randn(V))
    sampler.refresh(bias=head.bias)
    found = sampler(hidden_states, batch_of(), 1).token_ids.tolist()
    assert found == expected(head, hidden_states, 1)


def test_a_parameter_that_its_module_no_longer_has_is_said_once():
    head, hidden_states, batch = head_of(1, bias=True), torch.randn(ROWS, D), batch_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said while the module has what is read
        sampler = LMHeadSampler(head.weight, bias=head.bias, backend="numba")
        sampler(hidden_states, batch, 1)
        over_tensor = LMHeadSampler(head.weight.data, backend="numba")
    copied = copy.deepcopy(sampler)
    head.load_state_dict(head_of(2, bias=True).state_dict(), assign=True)
    with pytest.warns(UserWarning) as told:
        sampler(hidden_states, batch, 2)
    assert [each.filename for each in told] == [__file__] * 2
    for each, name in zip(told, ("weight", "bias"), strict=True):
        assert f"as after module.{name} = … or load_state_dict(assign=True)" in str(each.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler(hidden_states, batch, 3)
        sampler.refresh(head.weight, bias=head.bias)
        found = sampler(hidden_states, batch, 4).token_ids.tolist()
        assert found == expected(head, hidden_states, 4)
        over_tensor(hidden_states, batch, 5)  # a tensor may have no other owner
        copied(hidden_states, batch, 6)


def test_a_change_of_one_row_is_found_within_a_round():
    """Through `.data`, which torch does not count."""
    weight = head_of(1).weight.detach()
    sampler, hidden_states = LMHeadSampler(weight, screening="int8"), torch.randn(1, D)
    batch = SamplingBatch.from_params([SamplingParams()], vocab_size=V)
    weight.data[100] += 1
    with pytest.raises(ValueError, match=STALE):
        for step in range(-(-V // 8)):
            sampler(hidden_states, batch, step)
    sampler.refresh()
    for step in range(-(-V // 8)):
        sampler(hidden_states, batch, step)


@pytest.mark.parametrize("over", ["a module", "a tensor"])
def test_a_change_of_one_row_of_an_assigned_weight_is_found_at_once(over):
    """Torch counts it on the new tensor."""
    head, new = head_of(1), head_of(2).weight.detach()
    given = head if over == "a module" else head.weight
    sampler, hidden_states = LMHeadSampler(given, screening="int8"), torch.randn(1, D)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0.0)], vocab_size=V)
    head.load_state_dict({"weight": new}, assign=True)
    sampler.refresh(*(() if over == "a module" else (head.weight,)))
    for row in (100, 101):
        sampler(hidden_states, batch, 1)
        with torch.no_grad():
            head.weight[row] = hidden_states[0] * 100 * row
        with pytest.raises(ValueError, match=STALE):
            sampler(hidden_states, batch, 2)
        sampler.refresh()
        assert sampler(hidden_states, batch, 3).token_ids.tolist() == [row]


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (torch.randn(V, D).bfloat16(), r"expected torch.float32 \(211, 16\) on cpu .* got torch.b"),
        (torch.randn(V + 1, D), r"expected torch.float32 \(211, 16\) .* got torch.float32 \(212, "),
        (torch.randn(D, V).T, r"with strides \(16, 1\), .* with strides \(1, 211\); build a new"),
        (torch.empty(V, D, device="meta"), r"got torch.float32 \(211, 16\) on meta"),
    ],
    ids=["dtype", "rows", "strides", "device"],
)
def test_another_kind_of_weight_is_refused(new, told):
    weight = torch.randn(V, D)
    sampler, hidden_states = LMHeadSampler(weight), torch.randn(ROWS, D)
    with pytest.raises(ValueError, match=told):
        sampler.refresh(new)
    if new.device.type == "cpu":
        weight.data = new
        with pytest.raises(ValueError, match=told):
            sampler(hidden_states, batch_of(), 1)
    with pytest.raises(TypeError, match="lm_head_weight: expected a tensor, got Linear"):
        sampler.refresh(nn.Linear(D, V))
    with pytest.raises(ValueError, match="bias: the sampler was built without; build a new one"):
        sampler.refresh(bias=torch.zeros(V))


def test_a_refresh_whose_bias_is_wrong_takes_no_weight():
    weight, hidden_states = torch.randn(V, D), torch.randn(ROWS, D)
    sampler = LMHeadSampler(weight, bias=torch.zeros(V))
    before = sampler(hidden_states, batch_of(), 1).token_ids
    with pytest.raises(ValueError, match="bias: expected"):
        sampler.refresh(-weight, torch.zeros(V - 1))
    assert torch.equal(sampler(hidden_states, batch_of(), 1).token_ids, before)


def _distributed() -> list[list[int]]:
    """A DTensor, whose local part is replaced, and a copy that is old on one rank alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    heads = [head_of(seed).weight.detach() for seed in (1, 2)]
    weight = distribute_tensor(heads[0].clone(), mesh, [Shard(0)])
    sampler = LMHeadSampler(weight, screening="int8", backend="numba")
    hidden_states = torch.ones(ROWS, D)
    found = [sampler(hidden_states, batch_of(), 1).token_ids.tolist()]
    other = distribute_tensor(heads[1].clone(), mesh, [Shard(0)])
    sampler.refresh(other)
    found.append(sampler(hidden_states, batch_of(), 1).token_ids.tolist())
    if dist.get_rank():
        other.to_local().data.copy_(heads[0][: len(other.to_local())])
    with pytest.raises(ValueError, match=f"rank 1: {STALE}"):
        sampler(hidden_states, batch_of(), 2)
    return found


def test_ranks_follow_a_dtensor_and_tell_each_other_of_an_old_copy():
    for tokens, seed in zip(same_on_ranks(2, _distributed), (1, 2), strict=True):
        assert tokens == expected(head_of(seed), torch.ones(ROWS, D), 1)
