"""What a scaling run is asked for, and what it has measured: one JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import replace_json

SCHEMA = 1
RECORD = "result.json"

SAME = ("hardware", "cpu", "cpu_cores", "commit", "tpsample", "torch", "triton", "python")
"""What must not change between a run and the one that goes on with it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One measurement: all its candidates take turns."""

    world_size: int
    shape: str
    batch: int
    mode: str


@dataclass(frozen=True)
class Settings:
    """What is to be measured.

    Attributes:
        modes: names in `candidates.MODES`.
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

    def points(self, world_size: int) -> list[Point]:
        """Return the points of a world size, in the order in which they are measured."""
        return [
            Point(world_size, shape, batch, mode)
            for shape in self.shapes
            for batch in self.batches
            for mode in self.modes
        ]


@dataclass
class Record:
    """A run, over as many sessions as it took.

    Attributes:
        machine: see `benchmarks.machine.describe`.
        points: fields of a `Point`, with `rows`, `left_out` (candidate and why), `checks`.
        sessions: when each started and ended, its command, and how busy the machine was.
        notes: what a reader has to know, each once.
    """

    machine: dict[str, Any]
    settings: Settings
    points: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Replace the file at once: a process killed here leaves the last one whole."""
        replace_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Record:
        """Read a record.

        Raises:
            ValueError: it is not one of this schema.
        """
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or "points" not in data:
            raise ValueError(f"{path}: expected a record of benchmarks.scaling, schema {SCHEMA}")
        settings: dict[str, Any] = data["settings"]
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return Record(**{**data, "settings": Settings(**settings)})

    def note(self, *lines: str) -> None:
        self.notes += [line for line in lines if line not in self.notes]

    def missing(self, world_size: int) -> list[Point]:
        """Return the points of a world size that are yet to be measured."""
        done = {_point(each) for each in self.points}
        return [point for point in self.settings.points(world_size) if point not in done]

    @property
    def complete(self) -> bool:
        return not any(self.missing(world_size) for world_size in self.settings.world_sizes)

    def rows(self) -> Iterator[Row]:
        """Yield every measured candidate with its point, in order of the settings."""
        where = {each: i for w in self.settings.world_sizes for i, each in self._numbered(w)}
        for each in sorted(self.points, key=lambda each: where.get(_point(each), len(where))):
            for row in each["rows"]:
                yield {**asdict(_point(each)), **row}

    def _numbered(self, world_size: int) -> Iterator[tuple[int, Point]]:
        points = self.settings.points(world_size)
        first = self.settings.world_sizes.index(world_size) * len(points)
        yield from enumerate(points, first)

    def differences(self, machine: dict[str, Any], settings: Settings) -> list[str]:
        """Return why a run on `machine` with `settings` may not go on with this one."""
        found = [
            f"{name} was {self.machine.get(name)}, is {machine.get(name)}"
            for name in SAME
            if self.machine.get(name) != machine.get(name)
        ]
        old, new = asdict(self.settings), asdict(settings)
        found += [
            f"{name} was {old[name]}, is {new[name]}" for name in old if old[name] != new[name]
        ]
        return found


def _point(each: dict[str, Any]) -> Point:
    return Point(each["world_size"], each["shape"], each["batch"], each["mode"])
