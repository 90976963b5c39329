"""Draws the golden tokens on a GPU, and names those that differ.

    python -m tests.gpu.golden slots        one part, on one rank
    python -m tests.gpu.golden slots 3      on three virtual ranks of one GPU, which push words
    python -m tests.gpu.golden slots 3 nccl p2p     on three processes that share one GPU

Ends with 1 where a token, a logprob or a kept set is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.processes import join_on
from benchmarks.lab.started_ranks import StartedRanks
from tests.support import golden
from tests.support.cases import uneven_shards
from tests.support.golden_parts import V
from tpsample import VocabShard

LIMIT_S = 240


def recorded(
    part: str, world_size: int, device: str = "cuda", backend: str = "triton"
) -> list[dict[str, Any]]:
    """Return what each rank draws."""
    if world_size > 1:
        shards = uneven_shards(V, world_size)
        return golden.on_virtual_ranks([part], shards, device, backend=backend)
    with torch.device(device):
        return [golden.record(golden.maker(VocabShard(0, V), backend=backend), [part])]


def on_processes(
    part: str, world_size: int, backend: str, exchange: str, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Return what each of several processes draws that share a GPU."""
    with StartedRanks(world_size, _rank, part, backend, exchange, device) as started:
        return started.answers(started.everybody, LIMIT_S)


def _rank(line: Connection, part: str, backend: str, exchange: str, device: str) -> None:
    join_on(torch.device(device), backend)
    shard = uneven_shards(V, dist.get_world_size())[dist.get_rank()]
    with torch.device(device):
        line.send(golden.record(golden.maker(shard, exchange=exchange), [part]))
    dist.barrier()  # the others may still read this rank's memory


def main(arguments: Sequence[str]) -> int:
    part, world_size = arguments[0], int(arguments[1]) if len(arguments) > 1 else 1
    made = on_processes if len(arguments) > 2 else recorded
    found = made(part, world_size, *arguments[2:])
    wrong = [name for of_rank in found for name in golden.differing(of_rank, [part])]
    for name in wrong:
        print(f"differs: {name}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
