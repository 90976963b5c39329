"""A result as a Markdown page with plots: a pure function of its JSON.

python -m benchmarks.lab.page benchmarks/results/single_gpu-h200-2026-11-21
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.lab import quiet, text
from benchmarks.lab.plots import QUARTILES, plot, rows_of, scale_of, unique
from benchmarks.lab.results import POINT, RESULT, Result, Row
from benchmarks.lab.shapes import TINY

PAGE = "README.md"
ONE_SIDED = 6
"""Ratios that are all above 1 or all below it by chance in one of 32 pages."""


def write_page(folder: Path) -> Path:
    """Write the page and the plots of the result in `folder`; the page's path."""
    result = Result.load(folder / RESULT)
    sections = [f"# {result.benchmark}", result.question, *_warnings(result)]
    sections += _wins_and_losses(result.rows)
    on_gpu = result.machine["hardware"] != "CPU"
    for view in result.views:
        rows = rows_of(view, result.rows)
        if not rows:
            continue
        sections.append(f"## {view['title']}")
        sections += [f"![{view['title']}]({file})" for file in plot(view, rows, result, folder)]
        sections += [_table(view, each, rows, on_gpu) for each in unique(rows, view["panel"])]
    sections += [*_left_out(result), *_notes(result), *_machine(result)]
    page = folder / PAGE
    page.write_text("\n\n".join(sections) + "\n")
    return page


def _warnings(result: Result) -> list[str]:
    lines = list(result.warnings)
    if result.aborted:
        lines.append(f"Aborted, the numbers are void: {result.aborted}")
    if result.settings.get("tiny") and result.settings["shapes"] in ([TINY.name], []):
        lines.append("Tiny sizes: this run shows that the benchmark works, not how fast it is.")
    timed = any("median_us" in row for row in result.rows)
    if timed and result.machine["hardware"] == "CPU":
        lines.append("CPU: these times say nothing about a GPU.")
    if timed and (found := result.disturbances()):
        lines.append(f"The machine was not quiet, so take no time from here: {'; '.join(found)}.")
    if result.machine["triton_interpreter"]:
        lines.append("The kernels ran in the Triton interpreter.")
    return [f"**{line}**" for line in lines]


def _table(view: Row, panel: Any, every: list[Row], starred: bool) -> str:
    """Return a table, x down and series across; times have their quartiles."""
    rows = [row for row in every if row[view["panel"]] == panel]
    series, (unit, scale) = unique(rows, view["series"]), scale_of(view, every)

    def cell(row: Row) -> str:
        if view["y"] == "median_us" and QUARTILES[0] in row:
            star = " \\*" if starred and row.get("graph") is False else ""
            low, high = (text.three(row[name] / scale) for name in QUARTILES)
            return f"{text.three(row[view['y']] / scale)} ({low}–{high}){star}"
        value = row[view["y"]]
        return text.size(value) if "bytes" in view["y"] else text.three(value / scale)

    cells = {(row[view["x"]], row[view["series"]]): cell(row) for row in rows}
    prefix = "" if view["series"] in ("candidate", "family") else f"{view['series']} "
    header = [view["x"], *(f"{prefix}{name}" for name in series)]
    lines = [(x, *(cells.get((x, name), "") for name in series)) for x in _in_order(view, rows)]
    name = panel if isinstance(panel, str) else f"{view['panel']} {panel}"
    return f"{name}{f', {unit}' if unit else ''}:\n\n{text.table(header, lines)}"


def _in_order(view: Row, rows: list[Row]) -> list[Any]:
    """Return the values of x: numbers in rising order, names as they came."""
    found = unique(rows, view["x"])
    return found if isinstance(found[0], str) else sorted(found)


def _wins_and_losses(rows: list[Row]) -> list[str]:
    """Against the best baseline of the same point, the largest losses first."""
    compared = [row for row in rows if "over_best_baseline" in row]
    compared.sort(key=lambda row: -row["over_best_baseline"])
    columns = [name for name in _POINT if any(name in row for row in compared)]
    if len({row["candidate"] for row in compared}) == 1:
        columns.remove("candidate")
    sections: list[str] = []
    for title, lost in (("is not faster", True), ("is faster", False)):
        found = [row for row in compared if (row["over_best_baseline"] >= 1) == lost]
        if compared:
            sections.append(f"## Where tpsample {title}: {len(found)} of {len(compared)} points")
        if found:
            cells = [(*_ratio(row), *(row.get(name, "") for name in columns)) for row in found]
            header = ("times as long", "as", *columns)
            sections.append(text.table(header, cells, right=len(header)))
    return sections


_POINT = ("candidate", *POINT)


def _ratio(row: Row) -> tuple[str, str]:
    """Return tpsample's time ÷ the baseline's, starred if the ranges of both times overlap."""
    star = " \\*\\*" if row.get("may_be_chance") else ""
    return text.three(row["over_best_baseline"]), row["best_baseline"] + star


def _left_out(result: Result) -> list[str]:
    if not result.left_out:
        return []
    columns = (*_POINT, "why")
    rows = [[text.cell(each.get(name, "")) for name in columns] for each in result.left_out]
    table = text.table(columns, rows, right=len(columns))
    return ["## Left out, because it was wrong or did not run", table]


def _notes(result: Result) -> list[str]:
    notes, checks = list(result.notes), result.checks
    if (
        any(row.get("graph") is False for row in result.rows)
        and result.machine["hardware"] != "CPU"
    ):
        notes.append("\\* not captured in a CUDA graph: the host's time is included.")
    if doubtful := [row for row in result.rows if row.get("may_be_chance")]:
        notes.append("\\*\\* may be chance: the ranges overlap, or there are too few times.")
        slower = sum(row["over_best_baseline"] >= 1 for row in doubtful)
        if len(doubtful) >= ONE_SIDED and slower in (0, len(doubtful)):
            notes[-1] += (
                f" All {len(doubtful)} of them lie on one side; together that is no chance."
            )
    if result.aborted:
        notes.insert(0, "The comparison with the oracle failed.")
    elif checks.get("rows_compared"):
        gap = f" (the oracle's two scores at most {checks['largest_gap']:.2g} apart)"
        notes.insert(
            0,
            f"{checks['rows_compared']} rows of ids were compared with the oracle before timing; "
            f"{checks['near_ties']} differed within a near tie{gap * bool(checks['near_ties'])}, "
            "none otherwise.",
        )
    timed = any("repeats" in row for row in result.rows)
    if timed and (repeats := result.settings.get("repeats")):
        notes.append(
            "Times are median (first–third quartile) on the slowest rank; the candidates took "
            f"turns, {repeats} times each."
        )
    return ["## Notes", "\n".join(f"- {note}" for note in notes)]


def _machine(result: Result) -> list[str]:
    header = ("started", "ended", "load before (1, 5, 15 min)", "load after", "command")
    sessions = [
        (
            each.get("started", ""),
            each.get("ended", "killed"),
            quiet.shown(each["before"]),
            quiet.shown(each.get("after")),
            text.cell(each.get("command", "")),
        )
        for each in result.sessions
    ]
    facts = {**result.machine, **result.settings, **result.measured}
    cells = [(name, text.cell(value)) for name, value in facts.items() if value is not None]
    return [
        *("## Sessions", text.table(header, sessions, right=len(header))),
        *("## Machine and settings", text.table(("name", "value"), cells, right=2)),
    ]


if __name__ == "__main__":
    print(write_page(Path(sys.argv[1])))
