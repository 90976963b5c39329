"""The settings of one rank alone, for tests of the stages behind a sampler."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpsample import VocabShard
from tpsample.backends.triton_.tile_table import Gpu
from tpsample.ranks.ranks import Ranks
from tpsample.settings import Settings


def settings_of(weight: Tensor, shard: VocabShard, **others: Any) -> Settings:
    """Return settings in which kernels overlap where the GPU, or what passes for it, lets them."""
    overlap = Gpu.of(weight.device).hopper
    return Settings(Ranks(), weight, shard.stop, shard, **{"overlap": overlap, **others})
