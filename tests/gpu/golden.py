"""Draws the golden tokens on a GPU, and names those that differ.

    python -m tests.gpu.golden slots        one part, on one rank
    python -m tests.gpu.golden slots 3      on three virtual ranks of one GPU, which push words

Ends with 1 where a token, a logprob or a kept set is another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.lab.virtual_ranks import VirtualRanks, VirtualWorld
from tests.support import golden
from tests.support.cases import uneven_shards
from tests.support.golden_parts import PARTS, V
from tests.support.virtual import in_turn
from tpsample import VocabShard

EXACT = [part for part in PARTS if part != "cancelling"]
"""Without the part whose products a GPU sums in fp32, in another order."""


def recorded(
    part: str, world_size: int, device: str = "cuda", backend: str = "triton"
) -> list[dict[str, Any]]:
    """Return what each rank draws."""
    shards = uneven_shards(V, world_size)
    world = VirtualWorld(shards, torch.device(device))

    def of_rank(shard: VocabShard, ranks: VirtualRanks) -> dict[str, Any]:
        options = {"group": ranks, "exchange": "peer"} if world_size > 1 else {}
        make = golden.maker(shard, backend=backend, **options)
        with torch.device(device):
            if world_size == 1:
                return golden.record(make, [part])
            return golden.record(lambda *its, **more: in_turn(make(*its, **more), ranks), [part])

    bodies = [partial(of_rank, *each) for each in zip(shards, world.ranks, strict=True)]
    return [body() for body in bodies] if world_size == 1 else world.run(bodies)


def differing(part: str, found: dict[str, Any]) -> list[str]:
    """Return the names of what differs from the committed tokens, or is missing."""
    every = json.loads(golden.FILE.read_text())
    expected = {name: its for name, its in every.items() if name.split(",")[0] == part}
    return [name for name in expected | found if found.get(name) != expected.get(name)]


def main(arguments: Sequence[str]) -> int:
    part, world_size = arguments[0], int(arguments[1]) if len(arguments) > 1 else 1
    wrong = [name for found in recorded(part, world_size) for name in differing(part, found)]
    for name in wrong:
        print(f"differs: {name}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
