"""Mistakes of one rank among two: each call, and the message that comes on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.mistakes import HIDDEN, WEIGHT, B, D, V, batch_of, half
from tpsample import LMHeadSampler, VocabShard, verify
from tpsample.exchange import peer


def _written_temperature(sampler: LMHeadSampler, rank: int) -> object:
    batch = batch_of()
    batch.temperature[1] = 0.5 + 0.2 * rank
    return sampler(HIDDEN, batch, 0)


def _other_masks(sampler: LMHeadSampler, rank: int) -> object:
    batch = batch_of()
    batch.forced_token_ids = torch.tensor([3, 8 + rank])
    return sampler(HIDDEN, batch, 0)


def _peer_of_many(sampler: LMHeadSampler, rank: int) -> object:
    with mock.patch.object(peer, "MAX_WORLD_SIZE", 1):
        return LMHeadSampler(half(rank), exchange="peer")


def _appended_on_one(sampler: LMHeadSampler, rank: int) -> object:
    batch = batch_of(presence_penalty=1)
    sampler(HIDDEN, batch, 0)
    if rank == 0:
        batch.append(torch.tensor([1, 2]))
    return sampler(HIDDEN, batch, 1)


def _other_drafts(sampler: LMHeadSampler, rank: int) -> object:
    drafts = torch.tensor([[7], [8 + rank]])
    return verify(sampler, torch.ones(B, 2, D), drafts, batch_of(), 0)


SAME = "must be the same on every rank"
TOGETHER: dict[str, tuple[Callable[[LMHeadSampler, int], object], str]] = {
    "requests with other temperatures": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(temperature=0.5 + 0.25 * rank), 0),
        f"batch: row 0: temperature: {SAME}, got rank 0: 0.5, rank 1: 0.75",
    ),
    "a temperature that was written": (
        _written_temperature,
        f"temperatures: row 1: {SAME}, got rank 0: 0.5, rank 1: 0.699999988",
    ),
    "other seeds": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(seed=5 + rank), 0),
        f"seeds: row 0: {SAME}, got rank 0: 5, rank 1: 6",
    ),
    "a rank that skipped a step": (
        lambda sampler, rank: sampler(HIDDEN, batch_of(), torch.tensor([3, 4 + rank])),
        f"positions: row 1: {SAME}; a rank that skipped a step has others, got rank 0: 4, rank 1: "
        "5",
    ),
    "other drafts": (
        _other_drafts,
        f"token_ids: row 1: {SAME}, got rank 0: [8], rank 1: [9]",
    ),
    "other masks": (
        _other_masks,
        f"forced_token_ids: row 1: {SAME}, got rank 0: 8, rank 1: 9",
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
        "with shard = VocabShard.even(vocab_size, rank, world_size); where this is meant, name "
        "them by shard=",
    ),
    "the whole weight and no vocabulary size": (
        lambda sampler, rank: LMHeadSampler(WEIGHT),
        "lm_head_weight: rank 0 and rank 1 hold the same 20 rows; pass each rank its own rows, "
        "lm_head_weight[shard.start : shard.stop] with shard = VocabShard.even(vocab_size, rank, "
        "world_size); where this is meant, name them by shard=",
    ),
    "other arguments of the sampler": (
        lambda sampler, rank: LMHeadSampler(half(rank), chunks=1 + rank),
        f"chunks: {SAME}, got rank 0: 1, rank 1: 2",
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
