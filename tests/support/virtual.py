"""Ranks of the `peer` exchange in one process, whose kernels run in the interpreter."""

from __future__ import annotations

from typing import Any

from benchmarks.lab.virtual_ranks import VirtualRanks, VirtualWorld
from tests.support.cases import Case
from tpsample import LMHeadSampler, VocabShard
from tpsample.backends.triton_.tile_table import Tile
from tpsample.exchange.peer import PeerExchange

SMALL_TILE = Tile(block_v=128, block_b=4, block_d=16, num_warps=1, num_stages=1)


def virtual(case: Case, shards: list[VocabShard], tile: Tile | None = SMALL_TILE, **arguments):
    """A world of one sampler per shard; peers answer before `finish`, so nobody waits long."""
    world = VirtualWorld(shards)
    samplers = [
        LMHeadSampler(case.weight[s.start : s.stop], group=ranks, exchange="peer", **arguments)
        for s, ranks in zip(shards, world.ranks, strict=True)
    ]
    for sampler in samplers:
        small_tiles(sampler, tile)
        if len(shards) > 1:
            peer_of(sampler).timeout_s = 0.01
    return world, samplers


def small_tiles(sampler: LMHeadSampler, tile: Tile | None = SMALL_TILE) -> LMHeadSampler:
    """Let a sampler's kernels, if it has any, take tiles that the interpreter is fast with."""
    if sampler.backend == "triton":
        local: Any = sampler.local
        local.tile = tile
    return sampler


def in_turn(sampler: LMHeadSampler, ranks: VirtualRanks) -> LMHeadSampler:
    """Let each of its steps wait until every rank has sent its words.

    A body of `VirtualWorld.run` may then call the sampler, `verify` or `sample_draft`.
    """
    begin = sampler.pipeline.begin

    def begin_and_meet(*arguments: Any, **named: Any) -> Any:
        step = begin(*arguments, **named)
        ranks.meet()
        return step

    sampler.pipeline.begin = begin_and_meet  # type: ignore[method-assign]
    return sampler


def peer_of(sampler: LMHeadSampler) -> PeerExchange:
    """The exchange of a sampler that was built with "peer"."""
    assert isinstance(sampler.exchange, PeerExchange)
    return sampler.exchange


def assert_all_equal(outputs, expected):
    for rank, output in enumerate(outputs):
        assert output.token_ids.tolist() == expected.token_ids.tolist(), f"rank {rank}"
        assert output.status.tolist() == expected.status.tolist(), f"rank {rank}"


def step(world, samplers, case: Case, **arguments):
    return world.step(samplers, case.hidden_states, case.batch, case.positions, **arguments)


class Spy:
    """A kernel that hands each launch to `see`, which may return another grid, and makes it."""

    def __init__(self, kernel, see):
        self.kernel, self.see = kernel, see

    def __getitem__(self, grid):
        def launch(**arguments):
            self.kernel[self.see(self.kernel, grid, arguments) or grid](**arguments)

        return launch
