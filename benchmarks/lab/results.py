"""The result of one benchmark as JSON, which `benchmarks.lab.page` turns into a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.lab import quiet
from benchmarks.lab.timing import Timing

SCHEMA = 2
RESULT = "result.json"

Row = dict[str, Any]
POINT = ("shape", "mode", "world_size", "batch")
"""The columns that say where a row was measured, as far as it has them."""
SAME = ("hardware", "cpu", "cpu_cores", "commit", "tpsample", "torch", "triton", "python")
"""Facts of a machine that must not change between a run and the one that goes on with it."""


@dataclass(frozen=True)
class View:
    """One table and one plot of the rows: y over x, a line per series, a panel per shape.

    Attributes:
        name: the plot's file name; "" draws no plot.
        title: of the section; where y is a time, the page and the plot add the unit.
        where: only rows with these values.
        reference: y of a horizontal line, such as 1 for a ratio.
        x_label: text of the x axis; "" is the name of x.
        panel: the column whose values have a panel and a table each.
        ideal: whether a line shows x times tpsample's value at the smallest x.
    """

    name: str
    title: str
    x: str
    y: str = "median_us"
    series: str = "candidate"
    where: dict[str, Any] = field(default_factory=dict)
    reference: float | None = None
    x_label: str = ""
    panel: str = "shape"
    ideal: bool = False


@dataclass
class Result:
    """The measurements of one benchmark; `benchmarks.lab.harness.Run` explains notes and measured.

    Attributes:
        left_out: points with the `candidate` that has no time there, and `why`.
        warnings: lines in bold at the top of the page.
        aborted: why its numbers are void; None if they are not.
        sessions: `command`, `started`, `ended`, and loads (`quiet.load`) `before` and `after`.
    """

    benchmark: str
    question: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    views: list[dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    aborted: str | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Replace the file at once: a process killed here leaves the last one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)

    @staticmethod
    def load(path: Path) -> Result:
        """Read and validate.

        Raises:
            ValueError: not a result of this schema.
        """
        data = json.loads(path.read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"{path}: expected schema {SCHEMA}, got {data.get('schema')!r}")
        try:
            result = Result(**data)
        except TypeError as error:
            raise ValueError(f"{path}: not a benchmark result: {error}") from None
        for row in result.rows:
            if missing := {"shape", "batch", "candidate"} - row.keys():
                raise ValueError(f"{path}: a row lacks {', '.join(sorted(missing))}: {row}")
        return result

    @contextmanager
    def session(self, command: str) -> Iterator[None]:
        """Note how a session of measurements begins and ends: command, times and loads."""
        begun = {"command": command, "started": _now(), "before": quiet.load()}
        self.sessions.append(begun)
        try:
            yield
        finally:
            begun |= {"ended": _now(), "after": quiet.load()}

    def points(self) -> list[tuple[Any, ...]]:
        """Return the points that were measured or left out, each once."""
        every = (tuple(row.get(name) for name in POINT) for row in (*self.rows, *self.left_out))
        return list(dict.fromkeys(every))

    def disturbances(self) -> list[str]:
        """Return why the times are not those of a quiet machine; [] if it was quiet."""
        found = []
        for number, session in enumerate(self.sessions, 1):
            found += quiet.disturbances(
                session["before"],
                session.get("after"),
                cores=self.machine["cpu_cores"],
                ranks=self.machine["world_size"],
                name=f"session {number}" if len(self.sessions) > 1 else "the run",
            )
        return found


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def differences(old: Result, new: Result) -> list[str]:
    """Return why a run may not go on with an old one."""
    pairs = [(name, old.machine.get(name), new.machine.get(name)) for name in SAME]
    pairs += [(name, old.settings.get(name), value) for name, value in new.settings.items()]
    return [f"{name} was {before}, is {now}" for name, before, now in pairs if before != now]


def row(candidate: str, kind: str, timing: Timing, **point: Any) -> Row:
    """Return a result row: where it was measured (`point`), the candidate, and its time.

    Args:
        kind: "tpsample", "baseline", "limit" or, among several ranks, "one rank".
    """
    return {**point, "candidate": candidate, "kind": kind, **timing.fields()}


def with_ratios(
    rows: list[Row], limit_us: float | None = None, tile_read_us: float | None = None
) -> list[Row]:
    """Add time ÷ limit to all rows, and to tpsample's the time ÷ the best baseline's.

    Args:
        tile_read_us: of a read in the shape of the tiles; tpsample's time is divided by it too.
    """
    baselines = [each for each in rows if each["kind"] == "baseline"]
    best = min(baselines, key=lambda each: each["median_us"], default=None)
    for each in rows:
        if limit_us is not None:
            each["over_limit"] = each["median_us"] / limit_us
        if each["kind"] != "tpsample":
            continue
        if tile_read_us is not None:
            each["over_tile_read"] = each["median_us"] / tile_read_us
        if best is not None:
            each["over_best_baseline"] = each["median_us"] / best["median_us"]
            each["best_baseline"] = best["candidate"]
    return rows
