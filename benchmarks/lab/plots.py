"""The pictures of a result: each view over its x, one panel per shape, at most six lines in each.

The message is on top, the legend beside, the machine at the bottom.

A setting has one colour in all pictures of a result, whoever ran it: "tpsample, top_k 50" is drawn
solid, "sort, top_k 50" dashed and "topk, top_k 50" dotted in the same colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import baselines, text
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
PALETTE = (
    *("#1f5fbf", "#d1495b", "#e29a1f", "#3a8f5c", "#7b5ea7", "#6b6b6b"),
    *("#17a2b8", "#a0522d", "#c94f9b", "#8aa000", "#20344f", "#b0a48f"),
)
"""Twelve colours that differ; pictures stay below seven of them where they can."""

PANEL = (3.3, 3.2)
"""Inches of a panel."""
MOST_PANELS = 4


def unique(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a column, each once, in order."""
    return list(dict.fromkeys(row[name] for row in rows))


def rows_of(view: Row, rows: list[Row]) -> list[Row]:
    """Return the rows that a view shows."""
    where = view["where"].items()
    return [r for r in rows if view["y"] in r and all(r.get(name) == v for name, v in where)]


def scale_of(view: Row, rows: list[Row]) -> tuple[str, float]:
    """Return the unit in which the times of a view read best, and how many µs it has."""
    if not view["y"].endswith("_us"):
        return "", 1.0
    return ("ms", 1e3) if max(row[view["y"]] for row in rows) >= 1e4 else ("µs", 1.0)


def plot(view: Row, rows: list[Row], result: Result, folder: Path) -> list[str]:
    """Draw a view; return the names of its files, none where matplotlib is not installed."""
    if not view["name"] or not available():
        return []
    series = unique(rows, view["series"])
    if all(isinstance(each, int) for each in series):
        parts = [few(series, MOST_LINES)]
    else:
        parts = _parts(series, {row[view["series"]] for row in rows if row.get("kind") == BESIDE})
    below = footer(result.machine)
    below += " · the machine was not quiet" * bool(result.disturbances())
    files = []
    for number, names in enumerate(parts, 1):
        path = folder / f"{view['name']}{f'-{number}' * (number > 1)}.png"
        chosen = [row for row in rows if row[view["series"]] in names]
        files.append(_draw(view, chosen, _colours(view["series"], result.rows), path, below))
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


def _draw(view: Row, rows: list[Row], colours: Row, path: Path, below: str) -> str:
    x, y, (unit, scale) = view["x"], view["y"], scale_of(view, rows)
    chosen = unique(rows, view["panel"])
    if not all(isinstance(each, str) for each in chosen):
        chosen = few(chosen)
    figure, axes = panels(len(chosen))
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
                linestyle=STYLES.get(_runner(name), "-") if joined else "none",
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
        ticks(axis, [row[x] for row in own])
        if min(values) > 0 and max(values) > 20 * min(values):
            plain_numbers(axis)
        else:
            axis.set_ylim(bottom=min(0, *values))
        if "bytes" in y:
            axis.yaxis.set_major_formatter(lambda value, _: text.size(value))
        title = panel if isinstance(panel, str) else f"{view['panel']} {panel}"
        axis.set(title=title, xlabel=view["x_label"] or x.replace("_", " "))
    axes[0].set_ylabel(textwrap.fill(f"{view['title']}{f', {unit}' if unit else ''}", 36))
    return save(figure, path, _message(view, rows), below)


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
    return {each: PALETTE[i % len(PALETTE)] for i, each in enumerate(settings)}


def _runner(name: Any) -> str:
    """Return the beginning of a candidate's name that says who runs its setting, or nothing."""
    return next((runner for runner in STYLES if str(name).startswith(runner)), "")


def _setting(name: Any) -> str:
    return str(name).removeprefix(_runner(name))


def available() -> bool:
    """Return whether matplotlib is here: pages do without pictures where it is not."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    return True


def few(values: Iterable[int], most: int = MOST_PANELS) -> list[int]:
    """Return at most `most` of the values, the first, the last and some between."""
    values = sorted(set(values))
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def panels(number: int) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, side by side; text grows on a page as panels get smaller."""
    import matplotlib.pyplot as plt

    size = (number * PANEL[0] + 2.6, PANEL[1] + 1.1)  # the legend is beside
    figure, axes = plt.subplots(1, number, figsize=size, squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def ticks(axis: Any, values: Sequence[float]) -> None:
    """Put the measured values on the x axis by powers of two, and no label on top of another."""
    values = sorted(set(values))
    axis.set_xscale("log", base=2)
    shown: list[float] = []
    for value in reversed(values):
        if not shown or shown[-1] / value > 1.3:
            shown.append(value)
    axis.set_xticks(values, [f"{value:g}" if value in shown else "" for value in values])
    axis.minorticks_off()


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic y axis with 1, 2, 3, 5, 7, 10, … in place of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.three(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path, message: str, footer: str) -> str:
    """Write the picture; return its file name.

    Args:
        message: a sentence that says what the picture shows.
        footer: machine, versions, date.
    """
    import matplotlib.pyplot as plt

    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(
        list(handles.values()),
        [textwrap.fill(name, 30) for name in handles],
        loc="outside right center",
        frameon=False,
        fontsize="small",
    )
    columns = int(figure.get_figwidth() * 10.5)
    figure.suptitle(
        textwrap.fill(message, columns), x=0.01, ha="left", fontsize="medium", weight="bold"
    )
    figure.supxlabel(
        textwrap.fill(footer, int(columns * 1.5)),
        x=0.01,
        ha="left",
        fontsize="x-small",
        color="0.4",
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name


def footer(machine: dict[str, Any]) -> str:
    """Return the machine, the versions and the commit in a line."""
    hardware = machine["hardware"]
    if hardware == "CPU":
        hardware = f"{machine['cpu']}, {machine['cpu_cores']} cores"
    commit = (machine.get("commit") or "unknown")[:9]
    commit += " and changes" if machine.get("uncommitted_changes") else ""
    return (
        f"{hardware} · torch {machine['torch']} · triton {machine.get('triton')} · "
        f"tpsample {machine['tpsample']}, commit {commit} · {machine['date']}"
    )
