"""The exchange of integers: order, exact sums, counted bytes."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tpsample import UnsupportedParameter
from tpsample.ranks.integers import IntegerExchange
from tpsample.ranks.ranks import Ranks, ranks_of


class _RanksWithoutGroup(Ranks):
    world_size = 2


def test_ranks_without_a_process_group_refuse_before_they_send():
    integers = IntegerExchange(_RanksWithoutGroup())
    with pytest.raises(UnsupportedParameter, match="top_p"):
        integers.require_group()
    IntegerExchange(Ranks()).require_group()


def _count_and_sum() -> tuple[list, list, int]:
    integers = IntegerExchange(ranks_of(None))
    rank = dist.get_rank()
    own = torch.tensor([[rank, 2**60], [3, -rank]])
    gathered = integers.gather(own.T.contiguous().T)
    return gathered[:, 0].tolist(), integers.sum(own[:, :1]).tolist(), integers.bytes_sent


def test_the_integer_exchange_gathers_in_rank_order_sums_exactly_and_counts_its_bytes():
    for gathered, summed, sent in run_ranks(4, _count_and_sum):
        assert gathered == [[rank, 2**60] for rank in range(4)]
        assert summed == [[6], [12]]
        assert sent == 3 * 32 + 2 * 3 * 16 // 4
