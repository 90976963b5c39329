"""The committed tokens, on one rank and on several."""

import json

import pytest
import torch.distributed as dist

from tests.support import golden
from tests.support.ranks import run_ranks


def _on_rank() -> dict:
    return golden.on_shard(dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_are_those_that_were_committed(world_size):
    expected = json.loads(golden.FILE.read_text())
    found = run_ranks(world_size, _on_rank) if world_size > 1 else [golden.on_shard(0, 1)]
    for of_rank in found:
        for name, tokens in of_rank.items():
            assert tokens == expected[name], name
        assert list(of_rank) == list(expected)
    assert all(0 <= token < golden.V for token in expected["step 0"])
