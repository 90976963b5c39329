"""Finds the fastest tile for each shape on this GPU, and writes the table that the sampler reads.

    python -m benchmarks.gpu.tune                            all shapes, offline
    python -m benchmarks.gpu.tune --shapes 151936x4096 --batches 64 --world-sizes 1,8
    python -m benchmarks.gpu.tune --precompile 14            compiles first, in 14 processes
    python -m benchmarks.gpu.tune --seconds 480              until then; the table has what it found
    python -m benchmarks.gpu.tune --tiny --output FILE       a few seconds on any CPU

Every candidate's tokens are compared with the oracle before it is timed, among the others and in
the same run; a wrong one is left out and named, and the rule's own stops the run. A candidate
enters the table if it beats the rule's tile by more than 2 %, which is about the spread of a GPU's
clock. The table is written after every entry. Entries of other GPUs and shapes stay as they are.
Nothing is tuned while serving; ranks whose tables differ refuse to be built.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.precompile import compile_parts
from benchmarks.lab.harness import Run
from benchmarks.lab.problem import Candidate, Problem, WrongToken, make_sampler, override_tile
from benchmarks.lab.shapes import SHAPES, Shape, shape_named
from benchmarks.lab.timing import one_line
from benchmarks.static.aot import GPUS
from benchmarks.static.report import tile_text
from tpsample import VocabShard
from tpsample.core.interpreted import interpreted
from tpsample.distributed import Job
from tpsample.local import measured_tiles, tile_table
from tpsample.local.measured_tiles import MeasuredTile
from tpsample.local.tiles import Gpu, Tile

WORLD_SIZES = (1, 2, 4, 8)
BATCHES = (16, 32, 64, 128, 256)
MIN_GAIN = 1.02

# The rule of each batch tile is timed against these: (block_v, block_d, num_warps, num_stages). In
# turn: twice the depth at half the stages; short tiles (four fit an SM), because a lone
# program leaves it idle in its epilogue; high ones, which read the hidden states half as often;
# twice the warps. Chosen by bytes, waves and static counts, not by measurement.
_SMALL = ((128, 64, 4, 5), (128, 128, 4, 3), (64, 64, 4, 5), (64, 64, 4, 8), (256, 64, 8, 5))
CANDIDATES = {
    16: _SMALL,
    32: _SMALL,
    64: ((128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 4, 2), (256, 64, 8, 4), (64, 64, 4, 3)),
    128: ((128, 64, 8, 3), (256, 64, 8, 4), (256, 64, 8, 3), (128, 128, 8, 2)),
    256: ((128, 64, 8, 3), (128, 64, 8, 4)),
}


def candidates(rule: Tile, gpu: Gpu) -> list[Tile]:
    """Return tiles worth timing, the rule's first; one that does not fit is left out.

    Bits of a logit do not depend on any of this, as long as the matrix instruction is the same:
    block_v >= 64, 4 or 8 warps.
    """
    if not gpu.arch:  # the interpreter
        return [rule, dataclasses.replace(rule, block_v=rule.block_v // 2)]
    tried = [
        Tile(v, rule.block_b, d, num_warps, num_stages)
        for v, d, num_warps, num_stages in CANDIDATES[rule.block_b]
    ]
    return list(dict.fromkeys([rule, *(tile for tile in tried if fits(tile, gpu))]))


def fits(tile: Tile, gpu: Gpu) -> bool:
    """Return whether the stages of a tile fit the shared memory of one program, where it is known.

    A tile that cannot be launched for another reason is left out when it is tried.
    """
    limits = GPUS.get(gpu.arch)
    stage_bytes = (tile.block_v + tile.block_b) * tile.block_d * torch.bfloat16.itemsize
    return limits is None or tile.num_stages * stage_bytes <= limits.program_bytes


def tune(run: Run, world_sizes: tuple[int, ...]) -> Iterator[tuple[MeasuredTile, MeasuredTile]]:
    """Yield (the rule's tile, the fastest tile) of each shard, shape and batch."""
    gpu = Gpu.of(run.device)
    for world_size in world_sizes:
        for shape in run.shapes:
            weight = run.weight(shape)
            shard = weight[: len(VocabShard.even(shape.vocab_size, 0, world_size))]
            for batch in run.batches:
                yield _fastest(run, Problem.make(shard, batch), gpu)


def fill(run: Run, world_sizes: tuple[int, ...], path: Path, seconds: float) -> Iterator[str]:
    """Tune, bring the table at `path` up to date after every point, and yield a line for each.

    Args:
        seconds: no point is begun after this long.
    """
    start = time.monotonic()
    old = measured_tiles.load(path) if path.exists() else []
    found = []
    for rule, best in tune(run, world_sizes):
        found.append((rule, best))
        measured_tiles.save(path, merged(old, found))
        yield (
            f"{best.vocab_rows}×{best.hidden_size} batch {best.batch}: {tile_text(best.tile)} "
            f"{best.us:.1f} µs, rule {tile_text(rule.tile)} {best.rule_us:.1f} µs"
        )
        if time.monotonic() - start > seconds:
            run.note(f"Stopped after {seconds:.0f} s; the other shapes keep their entries.")
            break


def compile_first(
    run: Run, world_sizes: tuple[int, ...], workers: int, until: float
) -> dict[str, Any]:
    """Compile every candidate in `workers` processes, until a `time.time()`; return the counts."""
    if interpreted():
        return {"compiled": 0}
    parts = {
        f"tune {shape.name} {batch} 1/{world_size}": partial(rehearsed, shape, batch, world_size)
        for world_size in world_sizes
        for shape in run.shapes
        for batch in run.batches
    }
    return compile_parts(parts, run.device, until, workers)


def rehearsed(shape: Shape, batch: int, world_size: int, device: torch.device) -> None:
    """Tune one point, for `benchmarks.gpu.precompile.rehearse`."""
    run = Run(Job(device=device), shapes=(shape,), batches=(batch,), repeats=1)
    deque(tune(run, (world_size,)), maxlen=0)


def _fastest(run: Run, problem: Problem, gpu: Gpu) -> tuple[MeasuredTile, MeasuredTile]:
    vocab_rows, hidden_size = problem.weight.shape
    rule = tile_table.rule(problem.rows, vocab_rows, problem.weight.dtype, gpu)
    if not gpu.arch:
        rule = tile_table.interpreter_tile(problem.rows, hidden_size)
    point = f"{vocab_rows}×{hidden_size} batch {problem.rows}"
    steps: dict[str, Candidate] = {}
    token_ids: dict[str, Tensor] = {}
    tiles = {tile_text(tile): tile for tile in candidates(rule, gpu)}
    own = tile_text(rule)
    for name, tile in tiles.items():
        sampler = make_sampler(problem.weight, problem.rows)
        override_tile(sampler, tile)
        candidate = problem.sampled_by(sampler)
        try:
            candidate.check()
        except Exception as error:  # wrong, too much shared memory, or a compiler that gives up
            if name == own:
                raise
            run.note(f"{point}, {name}: left out, {one_line(error)}")
            continue
        steps[name], token_ids[name] = candidate, candidate.token_ids.clone()
        candidate.token_ids.fill_(-1)
    times = run.time({name: each.step for name, each in steps.items()}, own=[own])
    run.require_graphs()
    measured = {}
    for name, timing in times.items():
        if torch.equal(steps[name].token_ids, token_ids[name]):
            measured[name] = timing.median_us
        elif name == own:
            raise WrongToken("the timed steps gave other tokens than the checked one")
        else:
            run.note(f"{point}, {name}: left out, its timed steps gave other tokens")
    best = min(measured, key=lambda name: measured[name])
    size, us = tile_table.batch_tile(problem.rows), measured[own]
    entry = partial(MeasuredTile, gpu, vocab_rows, hidden_size, size)
    return entry(rule, us, us), entry(tiles[best], measured[best], us)


def merged(
    old: list[MeasuredTile], found: list[tuple[MeasuredTile, MeasuredTile]]
) -> list[MeasuredTile]:
    """Return the old entries, those of shapes just measured replaced; only gains are kept."""
    table = {entry.shape: entry for entry in old}
    for _, best in found:
        table.pop(best.shape, None)
        if best.rule_us > MIN_GAIN * best.us:
            table[best.shape] = best
    return list(table.values())


def main(arguments: list[str] | None = None) -> int:
    """Measure, print every shape's result, and write the table after each."""
    parser = argparse.ArgumentParser(prog="tune", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="such as 128256x8192,151936x4096; default all")
    parser.add_argument("--batches", help="such as 16,64; default one of every batch tile")
    parser.add_argument("--world-sizes", default=",".join(map(str, WORLD_SIZES)))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--precompile", type=int, metavar="N", help="in N processes, first")
    parser.add_argument("--seconds", type=float, help="begin no shape or batch after this long")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, on any machine")
    parser.add_argument("--output", type=Path, default=measured_tiles.FILE)
    options = parser.parse_args(arguments)
    shapes: tuple[Shape, ...] = SHAPES
    if options.shapes:
        shapes = tuple(shape_named(name) for name in options.shapes.split(","))
    batches = tuple(map(int, options.batches.split(","))) if options.batches else BATCHES
    world_sizes = tuple(map(int, options.world_sizes.split(",")))
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("no GPU here: the real sizes need one; try --tiny")
    if options.tiny and options.output == measured_tiles.FILE:
        parser.error("--tiny measures nothing worth keeping: give it another --output")
    job = Job(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if options.tiny:
        run, world_sizes = Run.small(job, batches=(3,), repeats=1), world_sizes[:1]
    else:
        run = Run(job, shapes=shapes, batches=batches, repeats=options.repeats)

    until = time.time() + (options.seconds or float("inf"))
    if options.precompile:
        first = min(until, time.time() + 600.0)
        print(compile_first(run, world_sizes, options.precompile, first), flush=True)
    for line in fill(run, world_sizes, options.output, until - time.time()):
        print(line, flush=True)
    print(*run.notes, options.output, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
