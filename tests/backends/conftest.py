"""Fixtures of the backends' tests."""

import pytest

from tests.support.tiers import long
from tests.support.twins import SHARDS, Twins


@pytest.fixture(
    params=[SHARDS[1], SHARDS[3], *long((SHARDS[0],), (SHARDS[2],))],
    ids=lambda shard: f"{shard[0]}-{shard[1]}",
)
def twins(request) -> Twins:
    return Twins(*request.param)
