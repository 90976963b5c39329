"""The local step of any number of ranks, which needs neither processes nor an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.cases import Case
from tests.support.settings import settings_of
from tpsample import SampleOutput, VocabShard
from tpsample.backends import room_of
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.tile_table import Tile
from tpsample.core.score import Head
from tpsample.exchange.base import Exchange

BACKENDS: dict[str, Any] = {"torch": TorchBackend, "numba": NativeBackend, "triton": TritonBackend}


def tile(block_v: int, block_b: int, block_d: int) -> Tile:
    """Blocks for the interpreter, which knows neither warps nor stages."""
    return Tile(block_v, block_b, block_d, num_warps=1, num_stages=1)


def step(
    case: Case,
    shards: Sequence[VocabShard] | None = None,
    *,
    backend: str = "torch",
    num_samples: int | None = None,
    bias: torch.Tensor | None = None,
    head: Head | None = None,
    padding: torch.Tensor | None = None,
    **override: Any,
) -> SampleOutput:
    """One step of the ranks that own `shards` (default: one rank), words merged by maximum.

    Args:
        bias: [V].
        padding: rows put behind every rank's shard, and behind its bias.
        override: `tile` of TritonBackend or `block_v` of TorchBackend.
    """
    shards = shards or [VocabShard(0, case.vocab_size)]
    samples, batch = num_samples or 1, case.batch
    slots = case.hidden_states.shape[0] * samples
    words = []
    for shard in shards:
        weight, shard_bias = case.weight[shard.start : shard.stop], bias
        if bias is not None:
            shard_bias = bias[shard.start : shard.stop]
        if padding is not None:
            weight = torch.cat([weight, padding.to(weight)])
            if shard_bias is not None:
                shard_bias = torch.cat([shard_bias, torch.full((len(padding),), 1e6)])
        settings = settings_of(
            weight,
            shard,
            max_rows=slots,
            bias=shard_bias,
            head=head or Head(),
        )
        exchange = Exchange(settings)
        local = BACKENDS[backend](settings)
        for name, value in override.items():
            setattr(local, name, value)
        step = local.prepare(
            case.hidden_states, batch._view_of(batch.rows), case.positions, samples
        )
        (own,) = exchange.begin(slots)
        local.best_words(step, own)
        words.append(own.clone())
    out = SampleOutput.empty(batch.seed, num_samples)
    room_of(backend).decoder()(torch.stack(words), batch.seed, out)
    return out
