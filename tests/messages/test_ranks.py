"""All ranks are told the same of a mistake that one of them made, and go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.calls import outcome
from tests.support.mistakes import HIDDEN, WEIGHT, V, batch_of, half
from tests.support.ranks import run_ranks
from tpsample import LMHeadSampler, VocabShard
from tpsample.exchange import peer


def _peer_of_many(sampler: LMHeadSampler, rank: int) -> object:
    with mock.patch.object(peer, "MAX_WORLD_SIZE", 1):
        return LMHeadSampler(half(rank), exchange="peer")


def _appended_on_one(sampler: LMHeadSampler, rank: int) -> object:
    batch = batch_of(presence_penalty=1)
    sampler(HIDDEN, batch, 0)
    if rank == 0:
        batch.append(torch.tensor([1, 2]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return sampler(HIDDEN, batch, 1)
        finally:  # the rank that forgot is told what to do, and no other
            assert sum("no token was appended" in str(each.message) for each in warned) == rank


SAME = "must be the same on every rank"
TOGETHER: dict[str, tuple[Callable[[LMHeadSampler, int], object], str]] = {
    "requests with other temperatures": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(temperature=0.5 + 0.25 * rank), 0),
        f"batch: row 0: temperature: {SAME}, got rank 0: 0.5, rank 1: 0.75",
    ),
    "a rank that skipped a step": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(), torch.tensor([3, 4 + rank])),
        f"positions: row 1: {SAME}; a rank that skipped a step has others, got rank 0: 4, rank 1: "
        "5",
    ),
    "tokens appended on one rank alone": (
        _appended_on_one,
        f"tokens so far: row 0: {SAME}, by digest; every rank appends the same tokens as often, "
        "got ",
    ),
    "another call": (
        lambda sampler, rank: sampler.compare() if rank else sampler(HIDDEN, batch_of(), 0),
        "call: every rank must make the same call, got rank 0: step, rank 1: compare",
    ),
    "a wrong argument on one rank": (
        lambda sampler, rank: sampler(HIDDEN.bfloat16() if rank else HIDDEN, batch_of(), 0),
        "rank 1: hidden_states: expected torch.float32 on cpu like lm_head_weight, got "
        "torch.bfloat16 (2, 4) on cpu; convert with .to(lm_head_weight)",
    ),
    "the whole weight on every rank": (
        lambda sampler, rank: LMHeadSampler(WEIGHT, vocab_size=V),
        "lm_head_weight: expected a shard of the 20 rows of the vocabulary, but every rank holds "
        "at least as many; pass each rank its own rows, lm_head_weight[shard.start : shard.stop] "
        "with shard = VocabShard.even(vocab_size, rank, world_size)",
    ),
    "the whole weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(WEIGHT),
        "lm_head_weight: rank 0 and rank 1 hold the same 20 rows; pass each rank its own rows, "
        "lm_head_weight[shard.start : shard.stop] with shard = VocabShard.even(vocab_size, rank, "
        "world_size)",
    ),
    "the whole weight beside a shard": (
        lambda sampler, rank: LMHeadSampler(WEIGHT, shard=VocabShard.even(V, rank, 2)),
        "lm_head_weight: rank 0 and rank 1 hold the same 20 rows; pass each rank its own rows, "
        "lm_head_weight[shard.start : shard.stop] with shard = VocabShard.even(vocab_size, rank, "
        "world_size)",
    ),
    "all columns of a head without a weight": (
        lambda sampler, rank: LMHeadSampler(
            torch.empty(V, 0), vocab_size=V, shard=VocabShard.even(V, rank, 2)
        ),
        "lm_head_weight: expected a shard of the 20 rows of the vocabulary, but every rank holds "
        "at least as many; pass each rank its own rows, ",
    ),
    "a head without a weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(torch.empty(10, 0)),
        "lm_head_weight: that of rank 0 has rows that are all alike, as before it is loaded, so "
        "its rows do not show where the vocabulary ends; pass vocab_size= or shard=",
    ),
    "rows that end in zeros, and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(torch.cat([half(rank), torch.zeros(rank, 4)])),
        "lm_head_weight: that of rank 1 ends in a row of zeros, as padding does, so its rows do "
        "not show where the vocabulary ends; pass vocab_size= or shard=",
    ),
    "padding behind the rows of every rank": (
        lambda sampler, rank: LMHeadSampler(torch.cat([half(rank), half(0)[:2]]), vocab_size=V),
        "lm_head_weight: the ranks' 12, 12 rows are 20 ids in two ways, ids 0 to 10, 10 to 20 "
        "with padding behind the rows of each rank, or ids 0 to 12, 12 to 20 with padding at the "
        "end; pass shard=VocabShard.even(vocab_size, rank, world_size), or "
        "VocabShard.padded(vocab_size, rank, world_size, multiple=24) as Megatron and vLLM pad",
    ),
    "rows that are the ids in another way than evenly": (
        lambda sampler, rank: LMHeadSampler(WEIGHT.roll(-11 * rank, 0)[: 11 - rank], vocab_size=V),
        "lm_head_weight: the ranks' 11, 10 rows are 20 ids in two ways, ids 0 to 10, 10 to 20 "
        "with padding behind the rows of each rank, or ids 0 to 11, 11 to 20 with padding at the "
        "end; pass shard=VocabShard.even(vocab_size, rank, world_size) or the shards of the "
        "second reading",
    ),
    "exchange='peer' without a kernel": (
        lambda sampler, rank: LMHeadSampler(half(rank), exchange="peer", backend="torch"),
        'exchange: "peer" is not possible here: rank 0: backend "torch" has no kernel that writes '
        "to peers; use a GPU, or the interpreter with TRITON_INTERPRET=1; rank 1: backend "
        '"torch" has no kernel that writes to peers; use a GPU, or the interpreter with '
        'TRITON_INTERPRET=1; or use exchange="collective"',
    ),
    "more ranks than peer takes": (
        _peer_of_many,
        'exchange: "peer" takes up to 1 ranks, got 2; use exchange="collective"',
    ),
    "a shard on one rank alone": (
        lambda sampler, rank: LMHeadSampler(half(rank), shard=None if rank else VocabShard(0, 10)),
        "shard: give it on every rank or on none, got ",
    ),
    "a shard beside a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(), shard=VocabShard(0, V)),
        "rank 0: shard: lm_head_weight is a DTensor whose rows on this rank are "
        "VocabShard(start=0, stop=10), got VocabShard(start=0, stop=20); leave shard= out; rank "
        "1: ",
    ),
    "a group beside a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(), group="alone"),
        "rank 0: group: lm_head_weight is a DTensor over ranks [0, 1], axis 0 of its mesh, got "
        "'alone'; leave group= out; rank 1: ",
    ),
    "columns of a DTensor": (
        lambda sampler, rank: LMHeadSampler(sharded(axis=1)),
        "rank 0: lm_head_weight: expected Shard(0) on one axis of the mesh and Replicate() on all "
        "others, so that each rank of that axis holds rows of its own; got a DTensor placed "
        "(Shard(dim=1),); redistribute it, or pass a plain tensor with shard= and group=; rank 1: ",
    ),
}


def sharded(axis: int = 0) -> Any:
    """Return the weight as a DTensor."""
    return distribute_tensor(WEIGHT, init_device_mesh("cpu", (2,)), [Shard(axis)])


def _all_together() -> dict[str, tuple[str, bool]]:
    """Return what this rank was told of each, and whether the step after it was right."""
    rank = dist.get_rank()
    sampler = LMHeadSampler(half(rank), backend="torch")
    expected = sampler(HIDDEN, batch_of(), 0).token_ids
    found = {}
    for name, (call, _) in TOGETHER.items():
        _, text = outcome(lambda call=call: call(sampler, rank))
        right = torch.equal(sampler(HIDDEN, batch_of(), 0).token_ids, expected)
        found[name] = (text, right)
    return found


def test_ranks_are_told_the_same_and_go_on() -> None:
    first, second = run_ranks(2, _all_together)
    assert first == second
    for name, (_, message) in TOGETHER.items():
        text, right = first[name]
        assert (text[: len(message)] if message.endswith(" ") else text, right) == (message, True)
