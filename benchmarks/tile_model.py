"""Predicts the time of the LM-head kernel from its tile, without a GPU: bytes, waves, instructions.

    python -m benchmarks.tile_model                          the rule in force, per shape and batch
    python -m benchmarks.tile_model --tile 256,128,64,8,4    one tile in its place
    python -m benchmarks.tile_model --measured FILE          beside the times of a shard result
    python -m benchmarks.tile_model --ceilings FILE          limits that `ceilings` measured

    python -m benchmarks.tile_model --screened               plain steps beside screened ones

The model of a launch is `benchmarks.launch_model`. To the last program's end come 1.5 µs for the
start of a graph and 1.5 µs for the second kernel, which is launched before the first has ended;
without that it would be 3 µs.

Every constant is an assumption with its source, unless `--ceilings` replaces it, and the result is
a prediction: it has been held against no measurement of this kernel yet. `benchmarks.calibration`
holds it against published times of another one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch_model import (
    MATRIX_EFFICIENCY,
    Chip,
    duration_us,
    grid_of,
)
from benchmarks.shapes import Shape, shape_named
from tpsample import VocabShard
from tpsample.local.tile_table import rule
from tpsample.local.tiles import Gpu, Tile

SHAPES = ("128256x8192", "151936x4096", "128256x4096", "151936x2048")
WORLD_SIZES = (1, 8)
BATCHES = (16, 32, 64, 128, 256, 512)
SHARED_MEMORY = 227 * 1024
REGISTERS = 65536
INSTRUCTIONS_PER_LOGIT = {16: 36, 32: 36, 64: 38, 128: 45, 256: 48}
"""By block_b, counted in SASS for sm_90 (`benchmarks.static_report`)."""


CHIPS = (Chip("NVIDIA H100", 132, 3.05e6), Chip("NVIDIA H200", 132, 4.45e6))


@dataclass(frozen=True)
class Prediction:
    """What the model says of one launch.

    Attributes:
        limit_us: time to read the weights once.
        step_us: of a whole step: this launch, the start of a graph and the second kernel.
        tiles, programs_per_sm, waves: how the grid fills the GPU.
        l2_per_weight_byte: bytes through L2 per byte of weights.
        in_flight: bytes of weights that an SM has under way.
    """

    limit_us: float
    step_us: float
    tiles: int
    programs_per_sm: int
    waves: float
    l2_per_weight_byte: float
    in_flight: int

    @property
    def over_limit(self) -> float:
        return self.step_us / self.limit_us


def programs_per_sm(tile: Tile) -> int:
    """Return how many programs of a tile an SM holds, by shared memory and registers.

    A thread needs its accumulators and about 64 registers beside them, at least 64 in all.
    """
    shared = tile.num_stages * (tile.block_v + tile.block_b) * tile.block_d * 2
    accumulators = tile.block_v * tile.block_b // (32 * tile.num_warps)
    registers = min(255, max(64, accumulators + 64))
    by_registers = REGISTERS // (registers * 32 * tile.num_warps)
    return max(1, min(SHARED_MEMORY // shared, by_registers))


def predict(
    chip: Chip,
    shape: Shape,
    world_size: int,
    batch: int,
    tile: Tile,
    instructions_per_logit: float | None = None,
) -> Prediction:
    """Return the predicted time of rank 0's shard of `shape` on one GPU.

    Args:
        instructions_per_logit: of another kernel's epilogue; None takes ours.
    """
    vocab_rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
    tiles = -(-vocab_rows // tile.block_v) * -(-batch // tile.block_b)
    resident = programs_per_sm(tile)
    # All batch tiles of a vocabulary tile read its weights; the first brings them into L2.
    batch_tiles = -(-batch // tile.block_b)
    per_logit = instructions_per_logit or INSTRUCTIONS_PER_LOGIT[max(16, min(256, tile.block_b))]
    grid = grid_of(chip, tile, tiles, resident, shape.hidden_size, per_logit, readers=batch_tiles)
    weights = vocab_rows * shape.hidden_size * 2.0
    return Prediction(
        limit_us=weights / chip.memory,
        step_us=duration_us(chip, grid) + chip.graph_us + chip.second_kernel_us,
        tiles=tiles,
        programs_per_sm=resident,
        waves=tiles / (chip.sms * resident),
        l2_per_weight_byte=grid.through_l2 * batch_tiles,
        in_flight=int(grid.in_flight * resident),
    )


def table(chip: Chip, tile: Tile | None = None) -> list[str]:
    """Return a Markdown table of predictions: µs / ratio to the read limit."""
    gpu = Gpu(chip.name, 90, chip.sms)
    lines = [f"{chip.name}, predicted: µs / ratio to reading the weights once", ""]
    lines += [
        "| part | shape | limit | " + " | ".join(f"B={batch}" for batch in BATCHES) + " |",
        "| --- | --- | ---: |" + " ---: |" * len(BATCHES),
    ]
    for world_size in WORLD_SIZES:
        for name in SHAPES:
            shape = shape_named(name)
            rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
            cells, limit_us = [], 0.0
            for batch in BATCHES:
                chosen = tile or rule(batch, rows, torch.bfloat16, gpu)
                found = predict(chip, shape, world_size, batch, chosen)
                limit_us = found.limit_us
                cells.append(f"{found.step_us:.0f}/{found.over_limit:.2f}")
            lines.append(f"| 1/{world_size} | {name} | {limit_us:.1f} | {' | '.join(cells)} |")
    return lines


def chip_of(result: dict[str, Any]) -> Chip:
    """Return the chip that a result was measured on, as the model assumes it."""
    for chip in CHIPS:
        if chip.name in result["machine"]["hardware"]:
            return chip
    raise SystemExit(f"tile_model: no constants for {result['machine']['hardware']!r}")


def measured_chip(path: Path) -> Chip:
    """Return the chip of a result of `benchmarks.ceilings`, with the limits that it reached."""
    result = json.loads(path.read_text())
    chip, found = chip_of(result), result["measured"]
    one_us = found["one_kernel_us"]
    matrix = found["matmul_tflops"] * 1e6 / (chip.sms * chip.clock)
    return replace(
        chip,
        memory=found["read_tb_per_s"] * 1e6,
        l2=found["l2_tb_per_s"] * 1e6,
        flops=matrix / MATRIX_EFFICIENCY,
        row_pieces=min(1.0, found["tile_read_tb_per_s"] / found["read_tb_per_s"]),
        graph_us=one_us,
        second_kernel_us=max(0.0, found["two_kernels_us"] - one_us),
    )


def against(path: Path, ceilings: Path | None = None) -> list[str]:
    """Return predictions beside the times of a result of `benchmarks.shard`."""
    result = json.loads(path.read_text())
    chip = measured_chip(ceilings) if ceilings else chip_of(result)
    gpu = Gpu(chip.name, 90, chip.sms)
    lines = ["| part | shape | B | measured µs | predicted µs | predicted ÷ measured |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in result["rows"]:
        if row["candidate"] != "tpsample":
            continue
        shape, world_size, batch = shape_named(row["shape"]), row["world_size"], row["batch"]
        rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
        tile = rule(batch, rows, torch.bfloat16, gpu)
        us = predict(chip, shape, world_size, batch, tile).step_us
        measured = row["median_us"]
        lines.append(
            f"| 1/{world_size} | {row['shape']} | {batch} | {measured:.1f} | {us:.1f} | "
            f"{us / measured:.2f} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="tile_model", description=__doc__.splitlines()[0])
    parser.add_argument("--tile", help="block_v,block_b,block_d,warps,stages in place of the rule")
    parser.add_argument("--screened", action="store_true", help="plain steps beside screened ones")
    parser.add_argument("--measured", type=Path, help="JSON of a shard result on one of the GPUs")
    parser.add_argument(
        "--ceilings", type=Path, help="JSON of a ceilings result on one of the GPUs"
    )
    options = parser.parse_args(arguments)
    if options.measured:
        print("\n".join(against(options.measured, options.ceilings)))
        return 0
    if options.screened:
        from benchmarks.screen_model import table as screened_table

        for chip in [measured_chip(options.ceilings)] if options.ceilings else CHIPS:
            print("\n".join(screened_table(chip)), end="\n\n")
        return 0
    tile = Tile(*map(int, options.tile.split(","))) if options.tile else None
    chips = [measured_chip(options.ceilings)] if options.ceilings else CHIPS
    for chip in chips:
        print("\n".join(table(chip, tile)), end="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
