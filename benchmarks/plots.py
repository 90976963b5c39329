"""The pictures of a result: each view over its x, a panel per shape, at most six lines in each.

A setting has one colour in all pictures of a result, whoever ran it: "tpsample, top_k 50" is drawn
solid, "sort, top_k 50" dashed and "topk, top_k 50" dotted in the same colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import drawing, filter_baselines, text, third_party
from benchmarks.results import Result

MOST_LINES = 6
BESIDE = ("plain", "gathered")
"""Kinds of rows that the others are held against, so that every picture of a view has them."""
STYLES: dict[str, Any] = {
    "tpsample, ": "-",
    f"{filter_baselines.SORT}, ": "--",
    f"{filter_baselines.TOPK}, ": ":",
    f"{filter_baselines.MASK}, ": "-.",
    f"{third_party.FLASHINFER}, ": (0, (5, 1, 1, 1, 1, 1)),
}
"""How lines are drawn, by the beginnings of the names of candidates that run one setting."""

Row = dict[str, Any]


def plot(view: Row, rows: list[Row], result: Result, folder: Path) -> list[str]:
    """Draw a view; return the names of its files, none where matplotlib is not installed."""
    if not drawing.available():
        return []
    series = list(dict.fromkeys(row[view["series"]] for row in rows))
    if all(isinstance(each, int) for each in series):
        parts = [drawing.few(series, MOST_LINES)]
    else:
        parts = _parts(series, {row[view["series"]] for row in rows if row.get("kind") in BESIDE})
    colours = _colours(view["series"], result.rows)
    forecast = any(row.get("kind") == "model" for row in rows)
    footer, files = drawing.footer(result.machine, not forecast), []
    for number, names in enumerate(parts, 1):
        path = folder / f"{view['name']}{f'-{number}' * (number > 1)}.png"
        chosen = [row for row in rows if row[view["series"]] in names]
        files.append(_draw(view, chosen, names, colours, unit_of(view, rows), path, footer))
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


def _draw(
    view: Row,
    rows: list[Row],
    names: Sequence[Any],
    colours: Row,
    unit: Unit,
    path: Path,
    footer: str,
) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = drawing.panels(len(shapes))
    y = view["y"]
    values = [row[y] / unit.size for row in rows]
    for axis, shape in zip(axes, shapes, strict=True):
        for number, name in enumerate(names):
            points = [r for r in rows if r["shape"] == shape and r[view["series"]] == name]
            points.sort(key=lambda row: row[view["x"]])
            if not points:
                continue
            x = [row[view["x"]] for row in points]
            colour = colours[_setting(name)]
            label = name if view["series"] == "candidate" else f"{view['series']} {name}"
            axis.plot(
                x,
                [row[y] / unit.size for row in points],
                linestyle=_style(name),
                marker="o",
                color=colour,
                label=label,
                markersize=9 - number,  # what equal lines lie on shows around them
                linewidth=3 - 0.35 * number,
            )
            if ends := ends_of(view, points):
                low, high = ([row[end] / unit.size for row in points] for end in ends)
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        if view["reference"] is not None:
            axis.axhline(view["reference"], color="black", linewidth=0.8, linestyle=":")
        drawing.ticks(axis, [row[view["x"]] for row in rows if row["shape"] == shape])
        if min(values) > 0 and (y.endswith("_us") or max(values) > 20 * min(values)):
            drawing.plain_numbers(axis)
        if "bytes" in y:
            axis.yaxis.set_major_formatter(lambda value, _: text.size(value))
        axis.set(title=shape, xlabel=view.get("x_label") or view["x"].replace("_", " "))
    axes[0].set_ylabel(textwrap.fill(view["title"] + unit.behind, 36))
    return drawing.save(figure, path, _message(view, rows, unit), footer)


@dataclass(frozen=True)
class Unit:
    """What the numbers of a view are divided by, and the unit that is written behind its title."""

    size: float = 1.0
    behind: str = ""


def unit_of(view: Row, rows: list[Row]) -> Unit:
    """Return the unit in which the times of a view read best."""
    if not view["y"].endswith("_us"):
        return Unit()
    name, size = text.unit_of_time(row[view["y"]] for row in rows)
    return Unit(size, f", {name}")


def _message(view: Row, rows: list[Row], unit: Unit) -> str:
    """What the picture shows, with its numbers."""
    if view["y"] != "over_best_baseline":
        ends = [f(row[view["y"]] for row in rows) / unit.size for f in (min, max)]
        low, high = map(text.size if "bytes" in view["y"] else text.three, ends)
        return f"{view['title']}: {low} to {high}{unit.behind.replace(',', '')}"
    ratios = [row["over_best_baseline"] for row in rows]
    slower = sum(ratio >= 1 for ratio in ratios)
    return (
        f"tpsample takes {text.three(min(ratios))} to {text.three(max(ratios))} times as long as "
        f"the best baseline; it is slower at {slower} of {len(ratios)} points"
    )


def ends_of(view: Row, points: list[Row]) -> Sequence[str] | None:
    """Return the names of the ends of the band around a line, if there is one."""
    ends = view.get("band") or (("q1_us", "q3_us") if view["y"] == "median_us" else None)
    return ends if ends and all(end in row for row in points for end in ends) else None


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
