"""Shards: the even split, and how the ranks' shards make a vocabulary."""

import pytest
import torch

from tpsample import RankMismatch, VocabShard
from tpsample.agreement.held_rows import resolve_shards


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 49152, 50257, 151936])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_even_is_torch_chunk(vocab_size, world_size):
    shards = [VocabShard.even(vocab_size, rank, world_size) for rank in range(world_size)]
    chunks = [len(chunk) for chunk in torch.arange(vocab_size).chunk(world_size)]
    assert [len(shard) for shard in shards] == chunks + [0] * (world_size - len(chunks))
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(
        range(vocab_size)
    )


def test_padded_is_how_megatron_and_vllm_split():
    """Figures of both: 50257 ids on 4 ranks, padded to 128 rows of each, and 32000 to 64."""
    shards = [VocabShard.padded(50257, rank, 4, multiple=128 * 4) for rank in range(4)]
    starts = [12672 * rank for rank in range(4)]
    assert [shard.start for shard in shards] == starts and shards[3].stop == 50257
    assert VocabShard.padded(32001, 1, 2, multiple=64) == VocabShard(16032, 32001)
    # A rank may hold padding alone.
    tiny = [VocabShard.padded(250, rank, 3, multiple=128 * 3) for rank in range(3)]
    assert tiny == [VocabShard(0, 128), VocabShard(128, 250), VocabShard(250, 250)]


@pytest.mark.parametrize("multiple", [0, 64, 1.0])
def test_padding_that_ranks_do_not_share_evenly_is_refused(multiple):
    with pytest.raises((TypeError, ValueError), match=r"^multiple: "):
        VocabShard.padded(1000, 0, 3, multiple=multiple)


@pytest.mark.parametrize("bounds", [(-1, 3), (4, 3), (0.0, 3), (True, 3)])
def test_bad_bounds(bounds):
    with pytest.raises((TypeError, ValueError), match="VocabShard"):
        VocabShard(*bounds)


def test_weight_rows_in_rank_order_make_the_vocabulary():
    assert resolve_shards(None, [None] * 3, [4, 0, 3]) == (
        7,
        [VocabShard(0, 4), VocabShard(4, 4), VocabShard(4, 7)],
    )


@pytest.mark.parametrize(
    ("rows", "starts"),
    [
        ([5, 5], [0, 5]),
        ([5, 6], [0, 5]),
        ([3, 7], [0, 3]),
        ([2, 9], [0, 2]),
        ([4, 4, 4], [0, 4, 8]),
    ],
)
def test_rows_of_a_vocabulary_that_have_one_reading(rows, starts):
    vocab_size, shards = resolve_shards(10, [None] * len(rows), rows)
    assert vocab_size == shards[-1].stop == 10 and [s.start for s in shards] == starts


@pytest.mark.parametrize("rows", [[6, 6], [6, 5], [5, 5, 5]])
def test_rows_of_a_vocabulary_that_have_two_readings_are_refused(rows):
    with pytest.raises(RankMismatch, match=f"{rows[0]}, .* rows are 10 ids in two ways"):
        resolve_shards(10, [None] * len(rows), rows)


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
