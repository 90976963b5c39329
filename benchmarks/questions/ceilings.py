"""The limits that a step is held against: rates of this GPU where nothing is in the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.lab import kernels, reads
from benchmarks.lab.baselines import has_triton
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.reads import TILE_READ, fastest, l2_read, tile_reads
from benchmarks.lab.results import Row, View, row
from benchmarks.lab.timing import Timing
from tpsample import VocabShard
from tpsample.backends.triton_.arguments import early_launch
from tpsample.core.machine import kernels_overlap

WORLD_SIZES = (1, 8)
_BYTES, _TINY_BYTES = 2 * 2**30, 2**16
_MATMUL, _TINY_MATMUL = 8192, 64


def rows(run: Run) -> Iterator[list[Row]]:
    """One row per limit; the rates are in the record, in TB/s (10^12 bytes)."""
    yield from _memory(run)
    if has_triton(run.device):
        yield from _tiles(run)
        yield from _starts(run)
    else:
        run.note("Without Triton nothing is read from L2 or tile by tile, and no kernel is empty.")
    yield from _matmul(run)


def _memory(run: Run) -> Iterator[list[Row]]:
    """A copy, a read, and a read that stays in L2."""
    source = torch.empty(_TINY_BYTES if run.tiny else _BYTES, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source.random_())
    times = run.time({"copy": lambda: target.copy_(source), **reads.weight_reads(source)})
    copy = _rate(run, "copy", times.pop("copy"), 2 * source.numel())
    yield [copy, _rate(run, "read", fastest(times, times), source.numel())]
    if not has_triton(run.device):
        return
    reread, num_bytes = l2_read(source, run.tiny)
    yield [_rate(run, "l2", run.time({"l2": reread})["l2"], num_bytes)]


def _tiles(run: Run) -> Iterator[list[Row]]:
    """The weights of each shape, whole and the first of eight shards, in the shape of the tiles."""
    for shape in run.shapes:
        weight = run.weight(shape)
        for world_size in WORLD_SIZES:
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            timing = run.time(tile_reads(shard))[TILE_READ]
            point = {"candidate": TILE_READ, "shape": shape.name, "world_size": world_size}
            yield [_rate(run, "tile_read", timing, 2 * shard.numel()) | point]


def _starts(run: Run) -> Iterator[list[Row]]:
    """Graphs of one kernel that does next to nothing, and of two, which overlap where they may."""
    one = torch.zeros(1, dtype=torch.int32, device=run.device)
    overlap = kernels_overlap(run.device)

    def empty(early: bool) -> None:
        kernels.empty_kernel[(1,)](one, OVERLAP=overlap, **early_launch(early))

    def two() -> None:
        empty(False)
        empty(overlap)

    times = run.time({"one kernel": lambda: empty(False), "two kernels": two})
    for name, timing in times.items():
        run.measured[f"{name.replace(' ', '_')}_us"] = timing.median_us
        yield [row(name, "limit", timing, shape="nothing", batch=1)]


def _matmul(run: Run) -> Iterator[list[Row]]:
    size = _TINY_MATMUL if run.tiny else _MATMUL
    a, b = (torch.randn(size, size, device=run.device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    timing = run.time({"matmul": lambda: torch.mm(a, b, out=product)})["matmul"]
    run.measured["matmul_tflops"] = 2 * size**3 / timing.median_us / 1e6
    yield [row("matmul", "limit", timing, shape=f"{size}x{size}x{size}", batch=1)]


def _rate(run: Run, name: str, timing: Timing, num_bytes: int) -> Row:
    rate = num_bytes / timing.median_us / 1e6
    run.measured.setdefault(f"{name}_tb_per_s", rate)  # the first: of tiles the largest, and whole
    point = {"shape": f"{num_bytes} bytes", "batch": 1}
    return {**row(name, "limit", timing, **point), "tb_per_s": rate}


BENCHMARK = Benchmark(
    "ceilings",
    "How fast can this GPU copy, read, read from L2, read tile by tile, multiply and start?",
    [View("rate", "Rate, TB/s", x="batch", y="tb_per_s"), View("time", "Time", x="batch")],
    rows,
)
