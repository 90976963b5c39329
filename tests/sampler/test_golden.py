"""The committed tokens, on one rank and on several."""

import json

import pytest
import torch.distributed as dist

from tests.support import golden
from tests.support.ranks import run_ranks


def _on_rank(backend: str) -> dict:
    return golden.on_shard(dist.get_rank(), dist.get_world_size(), backend)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "torch"), (1, "numba"), (2, "numba"), (3, "torch")]
)
def test_tokens_are_those_that_were_committed(world_size, backend):
    expected = json.loads(golden.FILE.read_text())
    if world_size > 1:
        found = run_ranks(world_size, _on_rank, backend)
    else:
        found = [golden.on_shard(0, 1, backend)]
    for of_rank in found:
        for name, tokens in of_rank.items():
            assert tokens == expected[name], name
        assert list(of_rank) == list(expected)
    assert all(0 <= token < golden.V for token in expected["step 0"])
