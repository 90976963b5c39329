"""The look of every picture: the message on top, the legend beside, the machine at the bottom."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import text

PALETTE = (
    *("#1f5fbf", "#d1495b", "#e29a1f", "#3a8f5c", "#7b5ea7", "#6b6b6b"),
    *("#17a2b8", "#a0522d", "#c94f9b", "#8aa000", "#20344f", "#b0a48f"),
)
"""Twelve colours that differ; pictures stay below seven of them where they can."""

PANEL = (3.3, 3.2)
"""Inches of a panel."""
MOST_PANELS = 4


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


def panels(number: int, size: tuple[float, float] = PANEL) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, side by side; text grows on a page as panels get smaller."""
    import matplotlib.pyplot as plt

    width = max(1, number) * size[0] + 2.6  # the legend's part
    figure, axes = plt.subplots(
        1, max(1, number), figsize=(width, size[1] + 1.1), squeeze=False, layout="constrained"
    )
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


def save(figure: Any, path: Path, message: str, footer: str, legend: str = "") -> str:
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
        title=legend or None,
        alignment="left",
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
