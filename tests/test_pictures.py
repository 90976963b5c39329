"""The pictures of the README are well formed, and their numbers follow from the sizes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

from benchmarks.lab import text
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support.commands import ROOT
from tpsample import VocabShard

PICTURES = ROOT / "benchmarks" / "pictures"
ROWS, VOCAB_SIZE, WORLD_SIZE = 256, 128256, 8
FILTERED_ROW = 1960
"""Most bytes that a rank hands to its peers for a row with top_p."""


@pytest.mark.parametrize("name", ["step.svg", "bytes.svg"])
def test_pictures_are_well_formed(name: str) -> None:
    ElementTree.fromstring((PICTURES / name).read_text())


def test_a_row_with_top_p_takes_no_more_bytes() -> None:
    problem = Problem.make(make_weight(1000, 64, torch.device("cpu")), 4).filtered(top_p=0.95)
    world = VirtualWorld([VocabShard.even(1000, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)])
    samplers = [
        make_sampler(problem.weight[shard.start : shard.stop], 4, group=ranks, exchange="peer")
        for shard, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    world.step(samplers, 2 * problem.hidden_states, problem.batch, problem.positions)
    for sampler, ranks in zip(samplers, world.ranks, strict=True):
        assert 0 < sampler.exchange.bytes_sent(4) + ranks.bytes_sent <= 4 * FILTERED_ROW


def test_bytes_are_those_of_the_first_table() -> None:
    logits = ROWS * VOCAB_SIZE * 4 * (WORLD_SIZE - 1) / WORLD_SIZE
    words = ROWS * 8 * (WORLD_SIZE - 1)
    filtered = ROWS * FILTERED_ROW
    moved = [text.size(logits / part) for part in (1, 2, WORLD_SIZE, 2 * WORLD_SIZE)]
    sizes = [*moved, text.size(filtered), text.size(words)]
    assert sizes[0] == "115 MB" and sizes[-1] == "14.3 KB"
    picture, readme = (PICTURES / "bytes.svg").read_text(), (ROOT / "README.md").read_text()
    for size in sizes:
        assert f">{size}<" in picture and size in readme, size
