"""Rows that no rejection decides, of two kinds, meet in one threshold: each gets its own token."""

import itertools

import pytest
import torch

from tests.support.cases import own_shard, uneven_shards
from tests.support.filtered import Rows, V, kinds_of_logits
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingParams
from tpsample.ranks.virtual import VirtualWorld

KINDS = kinds_of_logits()
NORMAL = 2 * torch.randn(2000, generator=torch.Generator().manual_seed(8))

STEP = [{"temperature": 50.0, "top_k": 300, "top_p": 0.01}, {"temperature": 50.0, "top_p": 0.001}]


def _steps(requests: list[dict], count: int) -> tuple[Rows, list[list[int]]]:
    """All rows of all steps, and which are of each."""
    width = len(requests)
    params = [SamplingParams(seed=i, **r) for _ in range(count) for i, r in enumerate(requests)]
    rows = Rows([NORMAL], params)
    rows.positions = torch.arange(count).repeat_interleave(width)
    return rows, [list(range(i * width, (i + 1) * width)) for i in range(count)]


def _tokens(rows: Rows, steps: list[list[int]]) -> torch.Tensor:
    """int64 [steps, rows of a step]."""
    shard = own_shard(rows.vocab_size, even=False)
    sampler = LMHeadSampler(**rows.head(shard))
    tokens = []
    for step in steps:
        batch = rows.batch.from_params([rows.params[i] for i in step], vocab_size=rows.vocab_size)
        tokens.append(sampler(rows.hidden_states[step], batch, rows.positions[step]).token_ids)
    return torch.stack(tokens)


@pytest.mark.parametrize("world_size", [1, *long(3)])
def test_two_rows_keep_their_tokens(world_size):
    rows, steps = _steps(STEP, 20)
    expected = rows.oracle().token_ids.view(len(steps), -1)
    for tokens in run_ranks(world_size, _tokens, rows, steps):
        wrong = (tokens != expected).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, f"{len(wrong)} of {len(steps)} steps, first at position {wrong[0]}"


# On equal logits no rejection decides these. The first two come to the threshold in turn.
MEETING = [{"top_k": 600, "top_p": 0.02}, {"top_p": 1e-6}, {"min_p": 1.0, "top_p": 0.002}]


def _meeting() -> Rows:
    params = [SamplingParams(seed=40 + i, **request) for i, request in enumerate(MEETING)]
    return Rows([KINDS["all-equal"]], params)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_order_of_the_rows_gives_each_its_own_token(world_size):
    rows = _meeting()
    orders = list(map(list, itertools.permutations(range(len(rows.params)))))
    expected = rows.oracle().token_ids[torch.tensor(orders)]
    for tokens in run_ranks(world_size, _tokens, rows, orders):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_kernels_give_each_row_its_own_token(world_size):
    rows, two = _meeting(), [0, 1]
    batch = rows.batch.from_params(rows.params[:2], vocab_size=V)
    shards = uneven_shards(V, world_size)
    world = VirtualWorld(shards)
    samplers = [
        LMHeadSampler(**{**rows.head(shard), "backend": "triton", "exchange": "peer"}, group=ranks)
        for shard, ranks in zip(shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, rows.hidden_states[two], batch, rows.positions[two]):
        assert torch.equal(out.token_ids, rows.oracle().token_ids[two])
