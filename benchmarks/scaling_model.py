"""What W ranks would take: measured shard times plus stated link numbers.

    step(W) = shard(W) + latency + (W − 1) · 8 · B / link bandwidth

shard(W) is read from a result of `shard`; where W was not measured it comes from a line fitted to
the measured ones, a + b / W. Every input and every predicted row says which it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Row, Run
from benchmarks.results import Result, View

QUESTION = "What would W = 1 … 8 ranks take, and one NVLink domain of 72 GPUs?"
VIEWS = [
    View("step", "Predicted time of a step, µs", x="world_size", y="step_us", series="batch"),
    View(
        "efficiency",
        "Predicted scaling efficiency, step(1) ÷ (W · step(W))",
        x="world_size",
        y="efficiency",
        series="batch",
        reference=1,
    ),
]

WORLD_SIZES = (*range(1, 9), 72)
MEASURED, FITTED, ASSUMED = "measured", "fitted to measured", "assumed"


@dataclass(frozen=True)
class Input:
    """A number the model takes in; `kind` is MEASURED only for what a result file holds."""

    name: str
    value: float
    unit: str
    kind: str
    source: str


LATENCY = Input(
    "exchange tail after the last tile",
    6.0,
    "µs",
    ASSUMED,
    "design target for 8 ranks on NVLink; published remote round trip on B300: about 1.5 µs",
)
LINK = Input(
    "NVLink bandwidth out of a GPU",
    450.0,
    "GB/s",
    ASSUMED,
    "NVIDIA H200 datasheet: 900 GB/s both directions together",
)
READ = Input("memory bandwidth", 4800.0, "GB/s", ASSUMED, "NVIDIA H200 datasheet")

Times = dict[int, float]
"""World size to µs."""


def rows(run: Run) -> Iterator[Row]:
    """One row per shape, batch size and number of ranks."""
    tables, kind = shard_times(run)
    for each in (LATENCY, LINK):
        run.inputs.append(asdict(each))
    for (shape, batch), times in tables.items():
        steps = {world_size: predict(times, world_size, batch) for world_size in (1, *WORLD_SIZES)}
        for world_size in WORLD_SIZES:
            yield {
                "shape": shape,
                "batch": batch,
                "world_size": world_size,
                "candidate": "model",
                "kind": "model",
                "shard_us": shard_us(times, world_size),
                "shard_time": kind if world_size in times or kind == ASSUMED else FITTED,
                "step_us": steps[world_size],
                "efficiency": steps[1] / (world_size * steps[world_size]),
                "tokens_per_s": batch / steps[world_size] * 1e6,
            }


def predict(times: Times, world_size: int, batch: int) -> float:
    """µs of a step; one rank exchanges nothing."""
    if world_size == 1:
        return shard_us(times, 1)
    words_us = (world_size - 1) * 8 * batch / (LINK.value * 1e3)
    return shard_us(times, world_size) + LATENCY.value + words_us


def shard_us(times: Times, world_size: int) -> float:
    """The given time of a shard of 1/W, else a + b / W by least squares, never below 0."""
    if world_size in times:
        return times[world_size]
    inverse = [1 / w for w in times]
    mean_x, mean_y = sum(inverse) / len(times), sum(times.values()) / len(times)
    spread = sum((x - mean_x) ** 2 for x in inverse)
    slope = sum((1 / w - mean_x) * (t - mean_y) for w, t in times.items()) / spread
    return max(0.0, mean_y + slope * (1 / world_size - mean_x))


def shard_times(run: Run) -> tuple[dict[tuple[str, int], Times], str]:
    """Shard times by shape and batch, and whether they are measured."""
    if run.shard_result is not None:
        return _measured(run, run.shard_result), MEASURED
    run.note("No shard result was given: shard times are weight bytes ÷ nominal bandwidth.")
    run.inputs.append(asdict(READ))
    return {
        (shape.name, batch): {
            world_size: shape.num_bytes / world_size / (READ.value * 1e3)
            for world_size in WORLD_SIZES
        }
        for shape in run.shapes
        for batch in run.batches
    }, ASSUMED


def _measured(run: Run, path: Path) -> dict[tuple[str, int], Times]:
    """The times in a result of `shard`.

    Raises:
        ValueError: the file holds no measured shard times, so they may not be called measured.
    """
    result = Result.load(path)
    if result.benchmark != "shard" or result.aborted:
        state = "an aborted one" if result.aborted else f"one of {result.benchmark}"
        raise ValueError(f"{path}: expected a complete result of shard, got {state}")
    tables: dict[tuple[str, int], Times] = defaultdict(dict)
    for row in result.rows:
        if row["candidate"] == "tpsample" and row.get("repeats", 0) > 0:
            tables[row["shape"], row["batch"]][row["world_size"]] = row["median_us"]
    tables = {point: times for point, times in tables.items() if len(times) > 1 and 1 in times}
    if not tables:
        raise ValueError(f"{path}: expected measured times of at least the whole and one part")
    hardware = result.machine["hardware"]
    for (shape, batch), times in tables.items():
        for world_size, value in times.items():
            name = f"shard 1/{world_size} of {shape}, batch {batch}"
            source = (
                f"{path.parent.name}/{path.name}, {hardware}, commit {result.machine['commit']}"
            )
            run.inputs.append(asdict(Input(name, value, "µs", MEASURED, source)))
    if result.settings["tiny"] or hardware == "CPU":
        run.note(f"The shard times were measured on {hardware} with tiny sizes: not a forecast.")
    return tables
