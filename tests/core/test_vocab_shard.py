"""Shards: the even split, and how the ranks' shards make a vocabulary."""

import pytest
import torch

from tpsample import RankMismatch, VocabShard
from tpsample.agreement.arguments import resolve_shards


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 49152, 50257, 151936])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_even_is_torch_chunk(vocab_size, world_size):
    shards = [VocabShard.even(vocab_size, rank, world_size) for rank in range(world_size)]
    chunks = [len(chunk) for chunk in torch.arange(vocab_size).chunk(world_size)]
    assert [len(shard) for shard in shards] == chunks + [0] * (world_size - len(chunks))
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(
        range(vocab_size)
    )


@pytest.mark.parametrize("bounds", [(-1, 3), (4, 3), (0.0, 3), (True, 3)])
def test_bad_bounds(bounds):
    with pytest.raises((TypeError, ValueError), match="VocabShard"):
        VocabShard(*bounds)


def test_weight_rows_in_rank_order_make_the_vocabulary():
    assert resolve_shards(None, [None] * 3, [4, 0, 3]) == (
        7,
        [VocabShard(0, 4), VocabShard(4, 4), VocabShard(4, 7)],
    )


def test_shards_may_lie_in_any_order_and_be_padded():
    given = [VocabShard(4, 7), VocabShard(0, 4)]
    assert resolve_shards(None, given, [64, 64]) == (7, given)


@pytest.mark.parametrize(
    ("vocab_size", "shards", "rows"),
    [
        (8, [VocabShard(0, 4), VocabShard(5, 8)], [4, 4]),
        (8, [VocabShard(0, 5), VocabShard(4, 8)], [5, 4]),
        (9, [VocabShard(0, 4), VocabShard(4, 8)], [4, 4]),
        (8, [VocabShard(0, 4), None], [4, 4]),
        (8, [None, None], [4, 3]),
        (None, [None, None], [2**20, 1]),
    ],
    ids=["gap", "overlap", "short", "one-missing", "too-few-rows", "too-large"],
)
def test_shards_that_do_not_fit(vocab_size, shards, rows):
    with pytest.raises(RankMismatch):
        resolve_shards(vocab_size, shards, rows)
