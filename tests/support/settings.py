"""The settings of one rank alone, for tests of the stages behind a sampler."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpsample import VocabShard
from tpsample.ranks.ranks import Ranks
from tpsample.settings import Settings


def settings_of(weight: Tensor, shard: VocabShard, **others: Any) -> Settings:
    return Settings(Ranks(), weight, shard.stop, shard, **others)
