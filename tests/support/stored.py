"""Filtered rows whose logits are stored already, on ranks of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support import host_reads
from tests.support.cases import uneven_shards
from tpsample import SampleOutput, SamplingBatch
from tpsample.core.row_noise import RowNoise
from tpsample.filters.finish import finish_logits, shard_logits
from tpsample.ranks.ranks import Ranks
from tpsample.request.step import Step

NOT_WRITTEN = -2
"""The token of a row without filters, whose unfiltered draw would stand there."""


def on_virtual_ranks(
    logits: torch.Tensor,
    batch: SamplingBatch,
    backend: str,
    world_size: int,
    num_samples: int | None = None,
) -> list[SampleOutput]:
    """Return what every rank makes of the filtered rows of a batch, from position 11 on.

    In fixed rounds the host may neither read a tensor nor send one.

    Args:
        logits: fp32 [F, V], of the rows that the batch stores.
    """
    shards = uneven_shards(logits.shape[1], world_size)
    world, view = VirtualWorld(shards), batch._view_of(batch.rows)
    noise = RowNoise(batch.temperature, batch.seed, 11 + torch.arange(batch.rows), num_samples or 1)

    def finish(ranks: Ranks) -> SampleOutput:
        shard = shards[ranks.rank]
        own = logits[:, shard.start : shard.stop].clone()
        out = SampleOutput.empty(view.seed, num_samples)
        out.token_ids.fill_(NOT_WRITTEN)
        out.status.zero_()
        step = Step(own[:, :0], view, noise, None, own, out)
        with host_reads.refused() if batch.plan.fixed_rounds else nullcontext():
            finish_logits(shard_logits(step, shard, backend), step, ranks)
        return out

    return world.run([partial(finish, ranks) for ranks in world.ranks])
