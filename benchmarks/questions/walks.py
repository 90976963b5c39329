"""How many functions and files of the package does one call walk through on the host?

    TRITON_INTERPRET=1 python -m benchmarks.questions.walks

A hook of Python's profiler counts the calls whose function lies in tpsample/, the kernels aside,
which are interpreted in place of a GPU. The times that belong to these walks are those of
`benchmarks.questions.host_overhead`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import tpsample
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard
from tpsample.core.interpreted import interpreted
from tpsample.ranks.virtual import VirtualWorld
from tpsample.request.step import Inputs

PACKAGE = str(Path(tpsample.__file__).parent)
KERNELS = (f"{PACKAGE}/kernels/", f"{PACKAGE}/native/")
V, D, ROWS = 512, 16, 4


class Walk(NamedTuple):
    """Counts of one call: functions of the package that ran, their files, and changes of file."""

    calls: int
    files: int
    changes: int


def walk(body: Callable[[], object], between: Callable[[], object] | None = None) -> Walk:
    """Return the counts of a call; with `between`, of two calls and not of what lies between."""
    seen: list[str] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not name.startswith(KERNELS):
            seen.append(name)

    for part in (body,) if between is None else (body, between, body):
        sys.setprofile(None if part is between else hook)
        try:
            part()
        finally:
            sys.setprofile(None)
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    return Walk(len(seen), len(set(seen)), changes)


def on_cpu(backend: Any = "numba", **fields: Any) -> Walk:
    """One rank on a CPU, a batch of equal requests; the second step is counted."""
    weight, hidden = torch.randn(V, D), torch.randn(ROWS, D)
    sampler: Any = LMHeadSampler(weight, backend=backend)
    params = [SamplingParams(seed=row, **fields) for row in range(ROWS)]
    batch = SamplingBatch.from_params(params, vocab_size=V)
    sampler(hidden, batch, 0)
    return walk(lambda: sampler(hidden, batch, 1))


def with_peer() -> Walk:
    """The host of one of two ranks whose kernels send the words."""
    weight, hidden = torch.randn(V, D), torch.randn(ROWS, D)
    world = VirtualWorld([VocabShard.even(V, rank, 2) for rank in range(2)])
    samplers = [
        LMHeadSampler(
            weight[shard.start : shard.stop], group=ranks, exchange="peer", backend="triton"
        )
        for shard, ranks in zip(world.shards, world.ranks, strict=True)
    ]
    batch = SamplingBatch.from_params([SamplingParams(seed=1)] * ROWS, vocab_size=V)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    world.step(samplers, hidden, batch, positions)
    begun: list[Any] = []

    def half() -> None:
        if begun:
            samplers[0].finish(begun[0])
        else:
            begun.append(samplers[0].start(Inputs(hidden), batch, positions + 1))

    return walk(half, lambda: samplers[1].start(Inputs(hidden), batch, positions + 1))


def on_slots() -> Walk:
    """Select, step and append on a CPU; one slot has top_p."""
    weight, hidden = torch.randn(V, D), torch.randn(ROWS, D)
    sampler, batch = LMHeadSampler(weight, backend="numba"), SamplingBatch.of_slots(8, vocab_size=V)
    batch.put(list(range(4)), [SamplingParams(seed=1)] * 3 + [SamplingParams(seed=2, top_p=0.9)])
    slots = torch.tensor([2, 0, 3, 1])
    held: list[Any] = [batch.select(slots)]
    out = sampler(hidden, held[0], 0)
    held[0].append(out.token_ids)

    def select() -> None:
        held[0] = batch.select(slots, out=held[0])
        held.append(sampler(hidden, held[0], 1, out=out))
        held[0].append(out.token_ids)

    return walk(select)


WALKS: dict[str, Callable[[], Walk]] = {
    "plain, peer, the host of one rank": with_peer,
    "plain, CPU": on_cpu,
    "plain, CPU, the definition": lambda: on_cpu("torch"),
    "top_p in all rows, CPU": lambda: on_cpu(top_p=0.9),
    "a penalty, CPU": lambda: on_cpu(frequency_penalty=0.2),
    "select, step, append; one slot has top_p": on_slots,
}


def main() -> int:
    """Print every walk."""
    if not interpreted():
        raise SystemExit("walks: set TRITON_INTERPRET=1; the kernels of peer need it on a CPU")
    print(f"{'':<44}{'calls':>7}{'files':>7}{'changes':>9}")
    for name, count in WALKS.items():
        found = count()
        print(f"{name:<44}{found.calls:>7}{found.files:>7}{found.changes:>9}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
