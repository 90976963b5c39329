"""Rows that no rejection decides, of two kinds, meet in one threshold: each gets its own token."""

import itertools

import pytest
import torch

from tests.support.cases import uneven_shards
from tests.support.filtered import Rows, V, kinds_of_logits
from tests.support.ranks import same_on_ranks
from tpsample import LMHeadSampler, SamplingParams
from tpsample.ranks.virtual import VirtualWorld

# On equal logits no rejection decides these. The first two come to the threshold in turn.
MEETING = [{"top_k": 600, "top_p": 0.02}, {"top_p": 1e-6}, {"min_p": 1.0, "top_p": 0.002}]


def _meeting() -> Rows:
    params = [SamplingParams(seed=40 + i, **request) for i, request in enumerate(MEETING)]
    return Rows([kinds_of_logits()["all-equal"]], params)


def _tokens(rows: Rows, orders: list[list[int]]) -> list[list[int]]:
    sampler, tokens = rows.sampler(), []
    for order in orders:
        batch = rows.batch.from_params([rows.params[i] for i in order], vocab_size=V)
        out = sampler(rows.hidden_states[order], batch, rows.positions[order])
        tokens.append(out.token_ids.tolist())
    return tokens


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_rows_in_any_order_have_each_their_own_token(world_size):
    rows = _meeting()
    orders = [list(each) for n in (1, 2, 3) for each in itertools.permutations(range(3), n)]
    oracle = rows.oracle().token_ids
    expected = [oracle[order].tolist() for order in orders]
    assert same_on_ranks(world_size, _tokens, rows, orders) == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_kernels_give_each_row_its_own_token(world_size):
    rows, two = _meeting(), [0, 1]
    batch = rows.batch.from_params(rows.params[:2], vocab_size=V)
    world = VirtualWorld(uneven_shards(V, world_size))
    how = {"backend": "triton", "exchange": "peer"}
    samplers = [
        LMHeadSampler(**rows.head(shard) | how, group=ranks)
        for shard, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, rows.hidden_states[two], batch, rows.positions[two]):
        assert torch.equal(out.token_ids, rows.oracle().token_ids[two])
