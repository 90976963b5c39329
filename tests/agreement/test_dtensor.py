"""A DTensor as the weight: its shard and group follow from it, and all else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.cases import Case
from tests.support.ranks import run_ranks, same_on_ranks
from tpsample import LMHeadSampler, RankMismatch, VocabShard, sample

V = 101  # no power of two, and odd


def _tokens(sampler: LMHeadSampler, case: Case) -> list[int]:
    return sampler(case.hidden_states, case.batch, case.positions).token_ids.tolist()


def _rows_of_a_mesh(case: Case) -> None:
    expected = case.oracle().token_ids.tolist()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    weight: Any = torch.nn.Parameter(distribute_tensor(case.weight, mesh, [Shard(0)]))
    sampler = LMHeadSampler(weight)
    assert sampler.shard == [VocabShard(0, 51), VocabShard(51, V)][rank]
    assert sampler.vocab_size == V
    assert sampler.ranks.group is mesh.get_group()
    assert sampler.weight.data_ptr() == weight.to_local().data_ptr(), "the weight was copied"
    assert _tokens(sampler, case) == expected

    # These may stand beside it: the same again, and a bias distributed alike.
    bias = torch.linspace(-1, 1, V)
    biased = LMHeadSampler(
        weight,
        shard=sampler.shard,
        group=dist.group.WORLD,
        vocab_size=V,
        bias=distribute_tensor(bias, mesh, [Shard(0)]),
    )
    assert _tokens(biased, case) == case.oracle(bias=bias).token_ids.tolist()
    plain = LMHeadSampler(weight, bias=bias[sampler.shard.start : sampler.shard.stop])
    assert _tokens(plain, case) == case.oracle(bias=bias).token_ids.tolist()

    linear = torch.nn.Linear(case.weight.shape[1], V, bias=False, dtype=case.weight.dtype)
    linear.weight.data.copy_(case.weight)
    model = torch.nn.ModuleDict({"output": linear})
    parallelize_module(model, mesh, {"output": ColwiseParallel(output_layouts=Replicate())})
    assert _tokens(LMHeadSampler(model["output"].weight), case) == expected

    one_call = sample(case.hidden_states, weight, case.params, positions=case.positions)
    assert one_call.token_ids.tolist() == expected


def test_shard_and_group_follow_from_the_rows_of_a_mesh():
    run_ranks(2, _rows_of_a_mesh, Case.make(V, 6))


def _padded(case: Case) -> None:
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.cat([case.weight, torch.full((64, case.weight.shape[1]), torch.nan).bfloat16()])
    sampler = LMHeadSampler(distribute_tensor(whole, mesh, [Shard(0)]), vocab_size=V)
    assert (
        sampler.shard == [VocabShard(0, 55), VocabShard(55, V), VocabShard(V, V)][dist.get_rank()]
    )
    assert _tokens(sampler, case) == case.oracle().token_ids.tolist()


def test_rows_from_vocab_size_on_are_padding_and_a_rank_may_have_no_others():
    run_ranks(3, _padded, Case.make(V, 4))


def _two_axes(case: Case) -> None:
    expected = case.oracle().token_ids.tolist()
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for placements, name in (([Replicate(), Shard(0)], "tp"), ([Shard(0), Replicate()], "dp")):
            sampler = LMHeadSampler(distribute_tensor(case.weight, mesh, placements))
            assert sampler.ranks.world_size == mesh[name].size()
            assert _tokens(sampler, case) == expected, (shape, name)


def test_on_two_axes_the_sharded_one_is_the_group():
    run_ranks(4, _two_axes, Case.make(V, 5))


def _refused() -> dict[str, str]:
    """Return the texts by case; those of shard, group and axis are in tests.messages."""
    rank, weight = dist.get_rank(), torch.randn(10, 4)
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1))
    rows = distribute_tensor(weight, mesh, [Shard(0)])
    replicated = distribute_tensor(weight, mesh, [Replicate()])
    partial = DTensor.from_local(weight, mesh, [Partial()])
    turned = DTensor.from_local(weight[:5], DeviceMesh("cpu", [1, 0]), [Shard(0)])
    calls = {
        "order": lambda: LMHeadSampler(turned),
        "Partial": lambda: LMHeadSampler(partial),
        "Replicate": lambda: LMHeadSampler(replicated),
        "two axes": lambda: LMHeadSampler(distribute_tensor(weight, square, [Shard(0), Shard(0)])),
        "bias": lambda: LMHeadSampler(
            rows, bias=distribute_tensor(weight[:, 0], mesh, [Replicate()])
        ),
        "three axes": lambda: LMHeadSampler(
            distribute_tensor(weight.unsqueeze(2), mesh, [Shard(0)])
        ),
        "vocab_size": lambda: LMHeadSampler(rows, vocab_size=11),
        "one rank": lambda: LMHeadSampler(rows if rank else replicated),
    }
    texts = {}
    for name, call in calls.items():
        with pytest.raises(RankMismatch) as error:
            call()
        texts[name] = str(error.value)
    return texts


def test_anything_else_is_refused_by_name_on_every_rank():
    told = same_on_ranks(2, _refused)
    for name, kind in (
        *(("Partial", "Partial"), ("Replicate", "Replicate")),
        ("two axes", "(Shard(dim=0), Shard(dim=0))"),
    ):
        assert "lm_head_weight: expected Shard(0) on one axis" in told[name], told[name]
        assert kind in told[name].split("got a DTensor placed")[1]
    assert "bias: expected a DTensor distributed as lm_head_weight" in told["bias"]
    assert "expected a mesh whose ranks ascend along axis 0" in told["order"], told["order"]
    assert "expected a DTensor [V, D], got 3 axes" in told["three axes"]
    assert "expected shards up to vocab_size=11" in told["vocab_size"]
    assert told["one rank"].startswith("rank 0: lm_head_weight: expected Shard(0)")
