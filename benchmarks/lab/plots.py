"""The pictures of a result: each view over its x, one panel per shape, at most six lines in each.

A setting has one colour in all pictures of a result, whoever ran it: "tpsample, top_k 50" is drawn
solid, "sort, top_k 50" dashed and "topk, top_k 50" dotted in the same colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lab import baselines, drawing, text
from benchmarks.lab.results import Result, Row

MOST_LINES = 6
BESIDE = "plain"
"""The kind of rows that the others are held against, so that every picture of a view has them."""
STYLES: dict[str, Any] = {
    "tpsample, ": "-",
    f"{baselines.SORT}, ": "--",
    f"{baselines.TOPK}, ": ":",
    f"{baselines.MASK}, ": "-.",
    f"{baselines.FLASHINFER}, ": (0, (5, 1, 1, 1, 1, 1)),
}
"""How lines are drawn, by the beginnings of the names of candidates that run one setting."""
QUARTILES = ("q1_us", "q3_us")


def unique(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a column, each once, in order."""
    return list(dict.fromkeys(row[name] for row in rows))


def rows_of(view: Row, rows: list[Row]) -> list[Row]:
    """Return the rows that a view shows."""
    where = view["where"].items()
    return [r for r in rows if view["y"] in r and all(r.get(name) == v for name, v in where)]


def scale_of(view: Row, rows: list[Row]) -> tuple[str, float]:
    """Return the unit in which the times of a view read best, and how many µs it has."""
    is_time = view["y"].endswith("_us")
    return text.unit_of_time(row[view["y"]] for row in rows) if is_time else ("", 1.0)


def plot(view: Row, rows: list[Row], result: Result, folder: Path) -> list[str]:
    """Draw a view; return the names of its files, none where matplotlib is not installed."""
    if not view["name"] or not drawing.available():
        return []
    series = unique(rows, view["series"])
    if all(isinstance(each, int) for each in series):
        parts = [drawing.few(series, MOST_LINES)]
    else:
        parts = _parts(series, {row[view["series"]] for row in rows if row.get("kind") == BESIDE})
    footer = drawing.footer(result.machine)
    footer += " · the machine was not quiet" * bool(result.disturbances())
    files = []
    for number, names in enumerate(parts, 1):
        path = folder / f"{view['name']}{f'-{number}' * (number > 1)}.png"
        chosen = [row for row in rows if row[view["series"]] in names]
        files.append(_draw(view, chosen, _colours(view["series"], result.rows), path, footer))
    return files


def _parts(series: list[Any], beside: set[Any]) -> list[list[Any]]:
    """Return the lines of each picture: as few pictures as can be, `beside` in all of them."""
    if len(series) <= MOST_LINES:
        return [series]
    always = [name for name in series if name in beside]
    others = [name for name in series if name not in beside]
    count = -(-len(others) // (MOST_LINES - len(always)))
    size = -(-len(others) // count)
    return [[*always, *others[i : i + size]] for i in range(0, len(others), size)]


def _draw(view: Row, rows: list[Row], colours: Row, path: Path, footer: str) -> str:
    x, y, (unit, scale) = view["x"], view["y"], scale_of(view, rows)
    chosen = unique(rows, view["panel"])
    if not all(isinstance(each, str) for each in chosen):
        chosen = drawing.few(chosen)
    figure, axes = drawing.panels(len(chosen))
    values = [row[y] / scale for row in rows]
    joined = len(unique(rows, x)) > 2  # a line would tell of what lies between two points
    for axis, panel in zip(axes, chosen, strict=True):
        own = sorted((r for r in rows if r[view["panel"]] == panel), key=lambda row: row[x])
        for number, name in enumerate(unique(rows, view["series"])):
            points = [row for row in own if row[view["series"]] == name]
            if not points:
                continue
            at, colour = [row[x] for row in points], colours[_setting(name)]
            axis.plot(
                at,
                [row[y] / scale for row in points],
                linestyle=_style(name) if joined else "none",
                marker="o",
                color=colour,
                label=name if isinstance(name, str) else f"{view['series']} {name}",
                markersize=9 - number,  # lines that lie under another stay visible around it
                linewidth=3 - 0.35 * number,
            )
            if (
                y == "median_us"
                and joined
                and all(end in row for row in points for end in QUARTILES)
            ):
                low, high = ([row[end] / scale for row in points] for end in QUARTILES)
                axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        first = [row for row in own if row["kind"] == "tpsample"][:1]
        if view["ideal"] and first:
            each, at = first[0][y] / first[0][x], unique(own, x)
            axis.plot(at, [each * v for v in at], "k--", linewidth=0.9, label=f"ideal: {x} × one")
        if view["reference"] is not None:
            axis.axhline(view["reference"], color="black", linewidth=0.8, linestyle=":")
        drawing.ticks(axis, [row[x] for row in own])
        if min(values) > 0 and max(values) > 20 * min(values):
            drawing.plain_numbers(axis)
        else:
            axis.set_ylim(bottom=min(0, *values))
        if "bytes" in y:
            axis.yaxis.set_major_formatter(lambda value, _: text.size(value))
        title = panel if isinstance(panel, str) else f"{view['panel']} {panel}"
        axis.set(title=title, xlabel=view["x_label"] or x.replace("_", " "))
    axes[0].set_ylabel(textwrap.fill(f"{view['title']}{f', {unit}' if unit else ''}", 36))
    return drawing.save(figure, path, _message(view, rows), footer)


def _message(view: Row, rows: list[Row]) -> str:
    """Return what the picture shows, with its numbers."""
    unit, scale = scale_of(view, rows)
    if view["y"] != "over_best_baseline":
        ends = [f(row[view["y"]] for row in rows) / scale for f in (min, max)]
        low, high = map(text.size if "bytes" in view["y"] else text.three, ends)
        return f"{view['title']}: {low} to {high}{f' {unit}' if unit else ''}"
    ratios = [row["over_best_baseline"] for row in rows]
    slower = sum(ratio >= 1 for ratio in ratios)
    return (
        f"tpsample takes {text.three(min(ratios))} to {text.three(max(ratios))} times as long as "
        f"the best baseline; it is slower at {slower} of {len(ratios)} points"
    )


def _colours(series: str, rows: list[Row]) -> Row:
    settings = dict.fromkeys(_setting(row[series]) for row in rows if series in row)
    return {each: drawing.PALETTE[i % len(drawing.PALETTE)] for i, each in enumerate(settings)}


def _setting(name: Any) -> Any:
    for runner in STYLES:
        if str(name).startswith(runner):
            return name.removeprefix(runner)
    return name


def _style(name: Any) -> Any:
    return next((style for runner, style in STYLES.items() if str(name).startswith(runner)), "-")
