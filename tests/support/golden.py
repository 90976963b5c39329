"""Tokens that must never change: every plan, control, way to change a batch and way to verify.

    python -m tests.support.golden            writes golden.json anew
    pytest tests/sampler/test_golden.py       compares it on every backend and exchange

A diff in golden.json is a change of the definition.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.virtual_ranks import VirtualRanks, VirtualWorld
from tests.support.golden_parts import DRAFTS, PARTS, ROWS, Make, V
from tests.support.virtual import in_turn, small_tiles
from tpsample import LMHeadSampler, Logprobs, SampleOutput, Status, VerifyOutput, VocabShard
from tpsample.backends.triton_.tile_table import Tile

FILE = Path(__file__).with_name("golden.json")
EXACT = [part for part in PARTS if part != "cancelling"]
"""Without the part whose products Triton sums in fp32, in another order."""
MOST = 5000
"""Longer lists are kept as a digest."""


def record(make: Make, parts: Sequence[str] = tuple(PARTS)) -> dict[str, Any]:
    """By name of what was done, all that came of it on this rank."""
    return {
        f"{part}, {name}{key}": value
        for part in parts
        for name, found in PARTS[part](make)
        for key, value in _told(found)
    }


def _told(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield all that an output says beyond its defaults."""
    if isinstance(found, (SampleOutput, VerifyOutput)):
        yield ": tokens", found.token_ids.tolist()
        if (found.status != Status.OK).any():
            yield ": status", found.status.tolist()
        if isinstance(found, VerifyOutput):
            yield ": accepted", found.num_accepted.tolist()
        elif found.kept is not None:
            for name in ("offsets", "token_ids", "sizes", "whole", "overflow"):
                yield f": kept {name}", getattr(found.kept, name).tolist()
            yield ": kept log_masses", _exactly(found.kept.log_masses)
        found = found.logprobs
    if isinstance(found, Logprobs):
        yield ": logprobs of", _short(found.token_ids.tolist())
        yield ": ranks", _short(found.ranks.tolist())
        yield ": logprobs", _exactly(found.values)
        yield ": entropies", _exactly(found.entropies)
    elif found is not None:
        yield "", found.tolist()


def _exactly(numbers: Tensor) -> list[float | str]:
    """Return every number as JSON can hold it; the digits of a float name its bits."""
    return _short([x if math.isfinite(x) else str(x) for x in numbers.flatten().tolist()])


def _short(found: list[Any]) -> list[Any]:
    """Return a list, or the SHA-256 of a long one."""
    text = json.dumps(found)
    return found if len(text) < MOST else [hashlib.sha256(text.encode()).hexdigest()]


def maker(shard: VocabShard, **options: Any) -> Make:
    """Return a function that builds samplers of a shard from a whole weight."""

    def make(weight: Tensor, bias: Tensor | None = None, **more: Any) -> LMHeadSampler:
        ids = slice(shard.start, shard.stop)
        return LMHeadSampler(
            weight[ids],
            bias=None if bias is None else bias[ids],
            vocab_size=V,
            shard=shard,
            max_rows=ROWS * (DRAFTS + 1),
            **options | more,
        )

    return make


def on_virtual_ranks(
    parts: Sequence[str],
    shards: list[VocabShard],
    device: str = "cpu",
    tile: Tile | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return what each rank of one process draws; their kernels push words to each other.

    Args:
        tile: of the kernels of the LM head; None takes that of the table.
    """
    world = VirtualWorld(shards, device)

    def of_rank(shard: VocabShard, ranks: VirtualRanks) -> dict[str, Any]:
        make = maker(shard, group=ranks, exchange="peer", **options)
        with torch.device(device):
            return record(
                lambda *its, **more: in_turn(small_tiles(make(*its, **more), tile), ranks), parts
            )

    return world.run([partial(of_rank, *each) for each in zip(shards, world.ranks, strict=True)])


def differing(found: dict[str, Any], parts: Sequence[str]) -> list[str]:
    """Return the names of what differs from the committed tokens of some parts, or is missing."""
    every = json.loads(FILE.read_text())
    expected = {name: its for name, its in every.items() if name.split(",")[0] in parts}
    return [name for name in expected | found if found.get(name) != expected.get(name)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # requests share seeds, and a row has no token, on purpose
    made = record(maker(VocabShard(0, V), backend="torch"))
    before = json.loads(FILE.read_text())
    changed = [name for name in before if made.get(name) != before[name]]
    print(f"{len(made.keys() - before.keys())} new, {len(changed)} changed or gone")
    print("\n".join(changed[:20]))
    short = {"separators": (",", ":")}
    lines = (f"{json.dumps(name)}: {json.dumps(value, **short)}" for name, value in made.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
