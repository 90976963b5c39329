"""The result of one benchmark as JSON: what `report` turns into a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing

SCHEMA = 1


@dataclass(frozen=True)
class View:
    """One table and one plot of the rows: y over x, a line per series, a panel per shape.

    Attributes:
        name: the plot's file name.
        title: what y is; where y is a time, the page and the plot add the unit.
        where: only rows with these values.
        reference: y of a horizontal line, such as 1 for a ratio.
        x_label: what x is; "" is its name.
        band: names of the low and the high end of y, where the rows have them.
    """

    name: str
    title: str
    x: str
    y: str = "median_us"
    series: str = "candidate"
    where: dict[str, Any] = field(default_factory=dict)
    reference: float | None = None
    band: tuple[str, str] | None = None
    x_label: str = ""


@dataclass
class Result:
    """What a benchmark has measured; see `benchmarks.harness.Run` for notes, measured, inputs.

    Attributes:
        aborted: why its numbers are void; None if they are not.
        loads: of the machine (`benchmarks.quiet.load`), "before" and "after" the run.
    """

    benchmark: str
    question: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    views: list[dict[str, Any]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    aborted: str | None = None
    loads: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Replace the file at once; see `replace_json`."""
        replace_json(path, asdict(self))

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


def replace_json(path: Path, data: dict[str, Any]) -> None:
    """Write the file at once: a process killed here leaves the last one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def row(candidate: str, kind: str, timing: Timing, **point: Any) -> dict[str, Any]:
    """A result row: where it was measured (`point`), what, and its time.

    Args:
        kind: "tpsample", "baseline", "limit" or, among several ranks, "one rank".
    """
    return {**point, "candidate": candidate, "kind": kind, **timing.fields()}


def with_ratios(
    rows: list[dict[str, Any]], limit_us: float | None = None, tile_read_us: float | None = None
) -> list[dict[str, Any]]:
    """Add time ÷ limit to all rows, and to tpsample's the time ÷ the best baseline's.

    Args:
        tile_read_us: of a read in the shape of the tiles; tpsample's time is divided by it too.
    """
    baselines = [each for each in rows if each["kind"] == "baseline"]
    best = min(baselines, key=lambda each: each["median_us"], default=None)
    for each in rows:
        if limit_us is not None:
            each["over_limit"] = each["median_us"] / limit_us
        if tile_read_us is not None and each["kind"] == "tpsample":
            each["over_tile_read"] = each["median_us"] / tile_read_us
        if best is not None and each["kind"] == "tpsample":
            each["over_best_baseline"] = each["median_us"] / best["median_us"]
            each["best_baseline"] = best["candidate"]
    return rows
