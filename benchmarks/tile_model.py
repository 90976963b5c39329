"""Predicts the time of the LM-head kernel from its tile, without a GPU: bytes, waves, instructions.

    python -m benchmarks.tile_model                          the rule in force, per shape and batch
    python -m benchmarks.tile_model --tile 256,128,64,8,4    one tile in its place
    python -m benchmarks.tile_model --measured FILE          beside the times of a shard result

A program (one tile) is in three phases, one after the other:

    prologue   2 µs, spread over ±25 %: three dependent cold loads, Philox, the first stages; after
               0.5 µs of it the program asks for the weights of its first stages (`PREFETCH`)
    loads      at the least of: its share of the memory's bandwidth, of L2's and of its SM's link,
               the bytes it has in flight ÷ latency, its share of the SM's matrix units
    epilogue   instructions per logit ÷ the rate at which the SM issues them

An SM runs as many programs as its registers and shared memory hold; the next tile starts when one
ends. To the last one's end come 1.5 µs for the start of a graph and 1.5 µs for the second kernel,
which is launched before the first has ended; without that it would be 3 µs.

Every constant below is an assumption with its source, and the result is a prediction: it has been
held against no measurement of this kernel yet. `benchmarks.calibration` holds it against published
times of another one.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.shapes import Shape, shape_named
from tpsample import VocabShard
from tpsample.local.tile_table import rule
from tpsample.local.tiles import Gpu, Tile

SHAPES = ("128256x8192", "151936x4096", "128256x4096", "151936x2048")
WORLD_SIZES = (1, 8)
BATCHES = (16, 32, 64, 128, 256, 512)
SHARED_MEMORY = 227 * 1024
REGISTERS = 65536
LATENCY_US = 0.82
"""Of a load from memory under load; published microbenchmarks of Hopper say 0.80 to 0.85."""
PROLOGUE_US, SPREAD = 2.0, 0.25
PREFETCH_US = 0.5
"""From a program's start to its prefetch: arithmetic of addresses, and no load before it."""
GRAPH_US, SECOND_KERNEL_US = 1.5, 1.5
ROW_PIECES = 0.97
"""Share of the bandwidth that reads of 128-byte pieces of rows reach."""
MATRIX_EFFICIENCY = 0.8
INSTRUCTIONS_PER_LOGIT = {16: 36, 32: 36, 64: 38, 128: 45, 256: 48}
"""By block_b, counted in SASS for sm_90 (`benchmarks.static_report`)."""


@dataclass(frozen=True)
class Chip:
    """A GPU as the model knows it.

    Attributes:
        sms: streaming multiprocessors.
        memory: bytes per µs that a stream read reaches.
        l2: bytes per µs from L2 to the SMs; the plots of FlashSampling sit on 6.5 to 8.2 million.
        clock: cycles per µs.
        link: bytes per cycle from L2 to one SM.
        flops: dense bf16 operations per cycle of one SM.
    """

    name: str
    sms: int
    memory: float
    l2: float = 7.5e6
    clock: float = 1750.0
    link: float = 64.0
    flops: float = 4096.0


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
    weight_bytes = tile.block_v * shape.hidden_size * 2.0
    through_l2 = 1 + tile.block_b / tile.block_v
    stages = tile.num_stages - 1.5  # at the wait one stage is in use and one may be unfinished
    in_flight = stages * tile.block_v * tile.block_d * 2
    logits = tile.block_v * tile.block_b
    per_logit = instructions_per_logit or INSTRUCTIONS_PER_LOGIT[max(16, min(256, tile.block_b))]
    instructions = logits * per_logit / 32

    def load_rate(loading: int, beside: int) -> float:
        """Bytes of weights per µs of one program, beside others on the GPU and on its SM."""
        return min(
            chip.memory * ROW_PIECES * batch_tiles / loading,
            chip.l2 / (loading * through_l2),
            chip.link * chip.clock / (beside * through_l2),
            in_flight / LATENCY_US,
            MATRIX_EFFICIENCY * chip.flops * chip.clock / (beside * tile.block_b),
        )

    # Events in order of time: a program prefetches, goes on to load the rest when that and its
    # prologue are over, and ends. Loads share bandwidth, so what is left of them is counted at the
    # rate that all have in common.
    slots = range(min(tiles, chip.sms * resident))
    waiting = tiles - len(slots)
    events: list[tuple[float, int, str]] = []  # (time, slot, "prefetch", "load" or "end")
    loading: dict[int, float] = {}  # slot: bytes left
    prologue_ends: dict[int, float] = {}  # slot: time, of programs that have yet to load the rest
    prefetched = min(1.0, tile.num_stages * tile.block_d / shape.hidden_size) * weight_bytes
    on_sm = [0] * chip.sms
    # One warp per scheduler hides less latency than two.
    epilogue_us = instructions / (4 * (0.55 if tile.num_warps <= 4 else 0.75) * chip.clock)

    def start(number: int, slot: int) -> None:
        spread = 1 + SPREAD * ((number * 0.618) % 1 * 2 - 1)
        prologue_ends[slot] = now + PROLOGUE_US * spread
        heapq.heappush(events, (now + PREFETCH_US * spread, slot, "prefetch"))

    now, started = 0.0, len(slots)
    for slot in slots:
        start(slot, slot)
    while events or loading:
        rates = {slot: load_rate(len(loading), on_sm[slot % chip.sms]) for slot in loading}
        first_done = min(
            ((left / rates[slot], slot) for slot, left in loading.items()), default=(1e30, -1)
        )
        until = events[0][0] - now if events else 1e30
        step = min(first_done[0], until)
        for slot in loading:
            loading[slot] -= rates[slot] * step
        now += step
        if first_done[0] <= until:
            slot = first_done[1]
            del loading[slot]
            on_sm[slot % chip.sms] -= 1
            if slot in prologue_ends:
                heapq.heappush(events, (max(now, prologue_ends.pop(slot)), slot, "load"))
            else:
                heapq.heappush(events, (now + epilogue_us, slot, "end"))
        else:
            _, slot, what = heapq.heappop(events)
            if what == "end":
                if waiting:
                    waiting -= 1
                    start(started, slot)
                    started += 1
            else:
                loading[slot] = prefetched if what == "prefetch" else weight_bytes - prefetched
                on_sm[slot % chip.sms] += 1
    weights = vocab_rows * shape.hidden_size * 2.0
    return Prediction(
        limit_us=weights / chip.memory,
        step_us=now + GRAPH_US + SECOND_KERNEL_US,
        tiles=tiles,
        programs_per_sm=resident,
        waves=tiles / (chip.sms * resident),
        l2_per_weight_byte=through_l2 * batch_tiles,
        in_flight=int(in_flight * resident),
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


def against(path: Path) -> list[str]:
    """Return predictions beside the times of a result of `benchmarks.shard`."""
    result = json.loads(path.read_text())
    chip = next((chip for chip in CHIPS if chip.name in result["machine"]["hardware"]), None)
    if chip is None:
        raise SystemExit(f"tile_model: no constants for {result['machine']['hardware']!r}")
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
    parser.add_argument("--measured", type=Path, help="JSON of a shard result on one of the GPUs")
    options = parser.parse_args(arguments)
    if options.measured:
        print("\n".join(against(options.measured)))
        return 0
    tile = Tile(*map(int, options.tile.split(","))) if options.tile else None
    for chip in CHIPS:
        print("\n".join(table(chip, tile)), end="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
