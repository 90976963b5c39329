"""The points of a scaling run, and how its result goes on after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.lab.results import Result, Row, View

SAME = ("hardware", "cpu", "cpu_cores", "commit", "tpsample", "torch", "triton", "python")
"""Facts of a machine that must not change between a run and the one that goes on with it."""


@dataclass(frozen=True)
class Point:
    """One measurement: all its candidates take turns."""

    world_size: int
    shape: str
    batch: int
    mode: str

    @staticmethod
    def of(row: Row) -> Point:
        return Point(row["world_size"], row["shape"], row["batch"], row["mode"])


@dataclass(frozen=True)
class Settings:
    """The points that are asked for.

    Attributes:
        modes: names in `candidates.MODES`.
        exchanges: of tpsample, each a candidate of every point.
        repeats: timed steps per candidate.
        threads: of every rank on a CPU, the same for each world size.
        tiny: sizes that say nothing about speed.
    """

    world_sizes: tuple[int, ...]
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    repeats: int
    threads: int
    tiny: bool = False
    exchanges: tuple[str, ...] = ("auto",)

    @staticmethod
    def of(result: Result) -> Settings:
        fields: dict[str, Any] = {}
        for name, value in result.settings.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return Settings(**fields)

    def points(self, world_size: int) -> list[Point]:
        """Return the points of a world size, in the order in which they are measured."""
        return [
            Point(world_size, shape, batch, mode)
            for shape in self.shapes
            for batch in self.batches
            for mode in self.modes
        ]


def unmeasured(machine: dict[str, Any], settings: Settings) -> Result:
    """Return a result without rows."""
    return Result(
        benchmark="scaling",
        question="Tokens per second over the number of ranks: tpsample, and both ways of moving "
        "logits, each with its fastest sampler?",
        machine=machine,
        settings=asdict(settings),
        views=[vars(view) for view in _views(settings)],
        notes=_notes(machine, settings),
    )


def _views(settings: Settings) -> Iterator[View]:
    for shape in settings.shapes:
        for mode in settings.modes:
            here, name = {"shape": shape, "mode": mode}, f"{shape}-{mode.replace(' ', '-')}"
            x: dict[str, Any] = {"x": "world_size", "panel": "batch"}
            fastest = {**here, "fastest": True}
            many = len(settings.world_sizes) > 1
            yield View(
                *(f"tokens-{name}" * many, f"Tokens per second, {shape}, {mode}"),
                **x,
                y="tokens_per_s",
                series="family",
                where=fastest,
                ideal=True,
            )
            yield View("", f"Time of a step, {shape}, {mode}", **x, where=here)
        largest = {"shape": shape, "world_size": max(settings.world_sizes), "fastest": True}
        yield View(
            *(f"bytes-{shape}", f"Bytes that a rank sends, {shape}, W = {largest['world_size']}"),
            x="batch",
            y="bytes_sent",
            series="family",
            panel="mode",
            where=largest,
        )
        yield View(
            *(f"ratio-{shape}", f"tpsample ÷ best baseline (below 1 is faster), {shape}"),
            x="batch",
            y="over_best_baseline",
            series="world_size",
            panel="mode",
            where={"shape": shape},
            reference=1,
        )


def _notes(machine: dict[str, Any], settings: Settings) -> list[str]:
    lines = [
        "tpsample's ids are compared with the oracle before a time counts, and again with the "
        "timed steps. Logits of a baseline are compared with the product of the whole weight, and "
        "its ids with those that the request allows.",
        "Requests: temperature 1 in all rows, with the filter that a heading names. In pictures "
        "and tables of tokens each exchange has its fastest sampler.",
    ]
    if machine["hardware"] != "CPU":
        return [*lines, "Steps are replays of a CUDA graph with a cold L2, unless marked."]
    return [
        *lines,
        f"Threads per rank, for every W: {settings.threads}. On a CPU tpsample's result is that of "
        "the exact product, rounded once to fp32. Baselines multiply in bf16.",
    ]


def missing(result: Result, world_size: int) -> list[Point]:
    """Return the points of a world size that are yet to be measured."""
    done = {Point.of(each) for each in (*result.rows, *result.left_out)}
    return [point for point in Settings.of(result).points(world_size) if point not in done]


def complete(result: Result) -> bool:
    """Return whether no point is missing."""
    return not any(missing(result, world_size) for world_size in Settings.of(result).world_sizes)


def differences(result: Result, machine: dict[str, Any], settings: Settings) -> list[str]:
    """Return why a run on `machine` with `settings` may not go on with this one."""
    pairs = [(name, result.machine.get(name), machine.get(name)) for name in SAME]
    old, new = asdict(Settings.of(result)), asdict(settings)
    pairs += [(name, old[name], new[name]) for name in new]
    return [f"{name} was {before}, is {now}" for name, before, now in pairs if before != now]


def warnings(result: Result, failed: list[str]) -> list[str]:
    """Return the warnings of the page: too many ranks, missing points, and sessions that failed."""
    settings, lines = Settings.of(result), list(failed)
    ranks, threads = max(settings.world_sizes), settings.threads
    cores = result.machine["cpu_cores"]
    if result.machine["hardware"] == "CPU" and ranks * threads > cores:
        lines.append(
            f"Up to {ranks} ranks of {threads} threads shared {cores} cores: more ranks than cores "
            "cannot be faster."
        )
    left = {w: len(found) for w in settings.world_sizes if (found := missing(result, w))}
    if left:
        each = ", ".join(f"{number} of W = {w}" for w, number in left.items())
        lines.append(f"Not complete: points are missing ({each}); the same command goes on.")
    return lines
