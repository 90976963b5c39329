"""Controls on chip: the mask kernel and the LM head's epilogue against their PyTorch twins."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.controls import Conversation, batch_of, bitmask_of
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, reference
from tpsample.local.control_arguments import make_mask
from tpsample.local.tile_table import Tile
from tpsample.ranks.ranks import Ranks
from tpsample.ranks.virtual import VirtualWorld
from tpsample.request.controls.apply import ControlRows, build_mask

V, D, ROWS = 331, 16, 24
SHARDS = [VocabShard(0, V), VocabShard(0, 90), VocabShard(91, 200), VocabShard(33, 34),
          VocabShard(318, V)]  # fmt: skip
_batch = functools.partial(batch_of, vocab_size=V)


def _talks(rows: int, seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    return [Conversation.random(rng, V) for _ in range(rows)]


def _drafts(rows: int, count: int) -> torch.Tensor:
    return torch.randint(6, (rows, count), generator=torch.Generator().manual_seed(3))


def _grammar(rows: int) -> torch.Tensor:
    rng = random.Random(5)
    return bitmask_of(
        [None if row % 3 == 0 else set(rng.sample(range(V), 150)) for row in range(rows)], V
    )


def _same_bits(batch: SamplingBatch, shard: VocabShard) -> None:
    assert isinstance(batch.view(batch.rows).controls, ControlRows)
    state = batch.view(batch.rows).controls.tables.state(shard)
    expected = build_mask(batch.view(batch.rows).controls, state).clone()
    state.mask_buffer(batch.rows).fill_(0x5A5A5A5A)
    assert torch.equal(make_mask(batch.view(batch.rows).controls, state), expected)


@pytest.mark.parametrize("shard", [*SHARDS[2:4], *long(*SHARDS[:2], SHARDS[4])], ids=str)
def test_the_mask_kernel_is_its_twin(shard):
    talks = _talks(ROWS)
    _same_bits(_batch(talks), shard)

    batch = _batch(talks)
    batch.grammar_bitmask = _grammar(ROWS)
    _same_bits(batch, shard)
    forced = torch.full((ROWS,), -1)
    forced[::4] = torch.arange(0, V, 17)[: len(forced[::4])]
    batch.forced_token_ids = forced
    _same_bits(batch, shard)

    drafted = _batch(talks).with_drafts(_drafts(ROWS, 3))
    _same_bits(drafted, shard)


def _sampler(weight: torch.Tensor, tile: Tile, **kwargs) -> LMHeadSampler:
    sampler = LMHeadSampler(weight, group=Ranks(), backend="triton", max_rows=64, **kwargs)
    local: Any = sampler.local
    local.tile = tile
    return sampler


TILES = [Tile(128, 32, 16, 4, 2), *long(Tile(64, 16, 16, 4, 2), Tile(32, 16, 16, 4, 2))]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_kernel_gives_the_oracles_tokens(tile):
    talks = _talks(ROWS, seed=1)
    generator = torch.Generator().manual_seed(2)
    hidden_states = torch.randn(ROWS, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    positions = torch.arange(ROWS)
    logits = reference.logits(hidden_states, weight)
    batch = _batch(talks)
    expected = reference.sample(logits, batch, positions)
    out = _sampler(weight, tile)(hidden_states, batch, positions)
    assert torch.equal(out.token_ids, expected.token_ids)
    assert torch.equal(out.status, expected.status)

    batch.append(out.token_ids)
    batch.grammar_bitmask = _grammar(ROWS)
    expected = reference.sample(logits, batch, positions + 1)
    out = _sampler(weight, tile)(hidden_states, batch, positions + 1)
    assert torch.equal(out.token_ids, expected.token_ids)


def test_the_kernel_counts_drafts():
    """Drafts that would win, of ids that nothing else is known of."""
    generator = torch.Generator().manual_seed(5)
    hidden_states = torch.randn(8, D, generator=generator).repeat_interleave(4, dim=0)
    weight = torch.randn(V, D, generator=generator)
    logits = reference.logits(hidden_states, weight)
    drafts = logits[::4].topk(3, dim=1).indices
    assert (drafts >= 64).any()
    params = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=2.0, seed=0)
    batch = SamplingBatch.from_params([params] * 8, vocab_size=V, output_token_ids=[[0]] * 8)
    drafted = batch.with_drafts(drafts)
    expected = reference.sample(logits, drafted, 7)
    assert (expected.token_ids.view(8, 4) != drafts[:, :1]).any(dim=1).sum() > 4
    out = _sampler(weight, Tile(64, 16, 16, 4, 2))(hidden_states, drafted, 7)
    assert torch.equal(out.token_ids, expected.token_ids)


@pytest.mark.parametrize("world_size", [3, *long(2)])
def test_virtual_ranks_apply_their_own_shards_state(world_size):
    talks = _talks(12, seed=6)
    for talk in talks:  # filters between ranks need a process group
        talk.params = replace(talk.params, top_k=0, top_p=1.0, min_p=0.0)
    generator = torch.Generator().manual_seed(7)
    hidden_states = torch.randn(12, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    expected = reference.sample(reference.logits(hidden_states, weight), _batch(talks), 3)
    batch = _batch(talks)
    world = VirtualWorld([VocabShard.even(V, rank, world_size) for rank in range(world_size)])
    samplers = [
        LMHeadSampler(
            weight[s.start : s.stop], group=ranks, exchange="peer", backend="triton", max_rows=16
        )
        for s, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    for out in world.step(samplers, hidden_states, batch, 3):
        assert torch.equal(out.token_ids, expected.token_ids)
