"""A forecast of what W ranks would take, as a band: shard times and link numbers, each with a mark.

    one NVLink domain        shard(W) + tail + (W − 1) · 8 · B / NVLink
    hosts of 8, two_level    the same inside a host, then tail between hosts + 2 · 8 · B / network

shard(W) is measured where a result of `shard` of a GPU is given and has it. Elsewhere it is what
`benchmarks.tile_model` says, scaled to the nearest measured shard where there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import calibration
from benchmarks.harness import Row, Run
from benchmarks.launch_model import Chip
from benchmarks.results import Result, View
from benchmarks.shapes import Shape, shape_named
from benchmarks.tile_model import CHIPS
from benchmarks.tile_model import predict as predict_tile
from tpsample import VocabShard
from tpsample.local.tile_table import rule
from tpsample.local.tiles import Gpu

QUESTION = "What would W ranks take in one NVLink domain, up to 72, and on hosts of 8?"
NVLINK, HOSTS = "one NVLink domain", "hosts of 8, two_level"


def _views(name: str, topology: str) -> list[View]:
    where = {"topology": topology}
    return [
        View(
            f"step_{name}",
            f"Forecast of a step, {topology}",
            x="world_size",
            y="step_us",
            series="batch",
            where=where,
            band=("step_low_us", "step_high_us"),
        ),
        View(
            f"efficiency_{name}",
            f"Forecast of step(1) ÷ (W · step(W)), {topology}",
            x="world_size",
            y="efficiency",
            series="batch",
            where=where,
            reference=1,
            band=("efficiency_low", "efficiency_high"),
        ),
    ]


VIEWS = [*_views("nvlink", NVLINK), *_views("hosts", HOSTS)]

WORLD_SIZES = {NVLINK: (1, 2, 4, 8, 16, 36, 72), HOSTS: (8, 16, 32, 64, 72)}
HOST = 8
BATCHES = (1, 16, 64, 256)
"""Of the batch sizes of a run, those that are forecast if there are any: more lines hide each
other, and the tile model takes seconds for each."""

MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"


@dataclass(frozen=True)
class Input:
    """A number that the model takes in.

    Attributes:
        low, high: the band; a step is fastest with the better end of every input.
        kind: MEASURED by us on a GPU, PUBLISHED by others, or ASSUMED.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    kind: str
    source: str


TAIL = Input(
    *("exchange after the last tile, inside", 6.0, 1.5, 20.0, "µs", ASSUMED),
    "middle: design target at 8 ranks; ends: published round trip over NVLink on B300, published "
    "small all-reduce of NCCL at 8 GPUs in a graph",
)
LINK = Input(
    *("NVLink bandwidth out of a GPU", 450.0, 360.0, 450.0, "GB/s", PUBLISHED),
    "NVIDIA H200 datasheet: 900 GB/s both directions together; that 80 % is reached is assumed",
)
BETWEEN = Input(
    *("exchange between hosts", 25.0, 10.0, 60.0, "µs", ASSUMED),
    "no source: a small all-reduce over InfiniBand takes tens of µs",
)
NETWORK = Input(
    *("network bandwidth of a GPU", 50.0, 25.0, 50.0, "GB/s", PUBLISHED),
    "NVIDIA ConnectX-7 datasheet: 400 Gb/s; that half is reached is assumed",
)
TILE_MODEL = Input(
    *("tile model: true time ÷ forecast", 1.0, 1 / calibration.BAND[1], 1 / calibration.BAND[0]),
    *("", PUBLISHED, "benchmarks.calibration: ten published times of FlashSampling's kernel"),
)
INPUTS = (TAIL, LINK, BETWEEN, NETWORK, TILE_MODEL)


@dataclass(frozen=True)
class Band:
    """A time in µs with its ends, and what it rests on."""

    us: float
    low_us: float
    high_us: float
    kind: str


Measured = dict[tuple[str, int], dict[int, Band]]
"""Shape and batch size to world size to time."""


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size, topology and number of ranks."""
    measured, chip = _measured(run, run.shard_result) if run.shard_result else ({}, CHIPS[-1])
    run.inputs += [asdict(each) for each in INPUTS]
    run.note(
        f"Shard times are of an {chip.name}; those not measured are of benchmarks.tile_model.",
        "A band takes the better, or the worse, end of every input at once.",
        f"A domain of 72 is built of other GPUs than {chip.name}: the row says what the exchange "
        "would cost there, with this GPU's shard times.",
    )
    points = list(measured) or [(s.name, b) for s in run.shapes for b in run.batches]
    chosen = [point for point in points if point[1] in BATCHES] or points
    for name, batch in chosen:
        times = measured.get((name, batch), {})
        shards: dict[int, Band] = {}
        for topology, world_sizes in WORLD_SIZES.items():
            for world_size in world_sizes:
                for each in {1, world_size} - shards.keys():
                    shards[each] = shard(chip, shape_named(name), each, batch, times)
                one = step(shards[1], 1, batch, NVLINK)
                found = step(shards[world_size], world_size, batch, topology)
                yield {
                    "shape": name,
                    "batch": batch,
                    "world_size": world_size,
                    "topology": topology,
                    "candidate": "model",
                    "kind": "model",
                    "shard_us": shards[world_size].us,
                    "shard_time": shards[world_size].kind,
                    "step_us": found.us,
                    "step_low_us": found.low_us,
                    "step_high_us": found.high_us,
                    "efficiency": one.us / (world_size * found.us),
                    "efficiency_low": one.us / (world_size * found.high_us),
                    "efficiency_high": one.us / (world_size * found.low_us),
                    "tokens_per_s": batch / found.us * 1e6,
                }


def shard(chip: Chip, shape: Shape, world_size: int, batch: int, measured: dict[int, Band]) -> Band:
    """Return the measured time of a shard of 1/W, or else the tile model's, scaled to the nearest.

    Args:
        measured: by world size.
    """
    if world_size in measured:
        return measured[world_size]
    us = _tile_us(chip, shape, world_size, batch)
    if measured:
        nearest = min(measured, key=lambda each: max(each, world_size) / min(each, world_size))
        us *= measured[nearest].us / _tile_us(chip, shape, nearest, batch)
    return Band(us, us * TILE_MODEL.low, us * TILE_MODEL.high, ASSUMED)


def step(shard: Band, world_size: int, batch: int, topology: str) -> Band:
    """Return the time of a step; one rank exchanges nothing."""
    if world_size == 1:
        return shard
    inside = world_size if topology == NVLINK else min(HOST, world_size)
    hosts = -(-world_size // inside)
    words = 8 * batch

    def exchange(end: str, bandwidth: str) -> float:
        us = getattr(TAIL, end) + (inside - 1) * words / (getattr(LINK, bandwidth) * 1e3)
        if hosts > 1:
            travels = 2 * (hosts - 1) / hosts * words
            us += getattr(BETWEEN, end) + travels / (getattr(NETWORK, bandwidth) * 1e3)
        return float(us)

    return Band(
        shard.us + exchange("value", "value"),
        shard.low_us + exchange("low", "high"),
        shard.high_us + exchange("high", "low"),
        shard.kind,
    )


def _tile_us(chip: Chip, shape: Shape, world_size: int, batch: int) -> float:
    gpu = Gpu(chip.name, 90, chip.sms)
    vocab_rows = len(VocabShard.even(shape.vocab_size, 0, world_size))
    tile = rule(batch, vocab_rows, torch.bfloat16, gpu)
    return predict_tile(chip, shape, world_size, batch, tile).step_us


def _measured(run: Run, path: Path) -> tuple[Measured, Chip]:
    """The times in a result of `shard`, and the GPU they were measured on.

    Raises:
        ValueError: the file holds no shard times of a GPU that the tile model knows.
    """
    result = Result.load(path)
    if result.benchmark != "shard" or result.aborted:
        state = "an aborted one" if result.aborted else f"one of {result.benchmark}"
        raise ValueError(f"{path}: expected a complete result of shard, got {state}")
    hardware = result.machine["hardware"]
    if hardware == "CPU" or result.machine["triton_interpreter"] or result.settings["tiny"]:
        raise ValueError(
            f"{path}: expected times of a GPU at real sizes, got {hardware}; nothing can be said "
            "of GPUs from it"
        )
    chip = next((chip for chip in CHIPS if chip.name in hardware), None)
    if chip is None:
        known = ", ".join(chip.name for chip in CHIPS)
        raise ValueError(f"{path}: benchmarks.tile_model has no {hardware}; it knows {known}")
    tables: Measured = defaultdict(dict)
    for row in result.rows:
        if row["candidate"] == "tpsample" and row.get("repeats", 0) > 0:
            band = Band(row["median_us"], row["q1_us"], row["q3_us"], MEASURED)
            tables[row["shape"], row["batch"]][row["world_size"]] = band
    if not tables:
        raise ValueError(f"{path}: expected measured shard times, got none")
    source = f"{path.parent.name}/{path.name}, {hardware}, commit {result.machine['commit']}"
    for (shape, batch), times in tables.items():
        for world_size, band in times.items():
            name = f"shard 1/{world_size} of {shape}, batch {batch}"
            ends = (band.us, band.low_us, band.high_us)
            run.inputs.append(asdict(Input(name, *ends, "µs", MEASURED, source)))
    return dict(tables), chip
