"""A result as a Markdown page with plots: a pure function of its JSON.

python -m benchmarks.report benchmarks/results/single_gpu-h200-2026-11-21
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import quiet, text
from benchmarks.plots import Unit, ends_of, plot, unit_of
from benchmarks.results import Result
from benchmarks.shapes import TINY

RESULT = "result.json"
PAGE = "README.md"

Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Write the page and the plots of the result in `folder`; the page's path."""
    result = Result.load(folder / RESULT)
    on_gpu = result.machine["hardware"] != "CPU"
    sections = [f"# {result.benchmark}", result.question, *_warnings(result)]
    for view in result.views:
        rows = _rows_of(view, result.rows)
        if not rows:
            continue
        sections.append(f"## {view['title']}")
        sections += [f"![{view['title']}]({file})" for file in plot(view, rows, result, folder)]
        sections += [_table(view, shape, rows, on_gpu) for shape in _unique(rows, "shape")]
    sections += [*_wins_and_losses(result.rows), *_inputs(result), *_provenance(result)]
    page = folder / PAGE
    page.write_text("\n\n".join(sections) + "\n")
    return page


def _warnings(result: Result) -> list[str]:
    lines = []
    if result.aborted:
        lines.append(f"**Aborted, the numbers are void: {result.aborted}**")
    if result.settings["tiny"] and result.settings["shapes"] == [TINY.name]:
        lines.append("**Tiny sizes: this run shows that the benchmark works, not how fast it is.**")
    if any(row.get("kind") == "model" for row in result.rows):
        return [*lines, "**A forecast: no time on this page was measured, unless marked so.**"]
    if result.machine["hardware"] == "CPU":
        lines.append("**CPU: these times say nothing about a GPU.**")
    lines += quiet.warning(_disturbances(result))
    if result.machine["triton_interpreter"]:
        lines.append("**The kernels ran in the Triton interpreter.**")
    return lines


def _disturbances(result: Result) -> list[str]:
    if "before" not in result.loads:  # older results do not say how busy the machine was
        return []
    ranks, cores = result.machine["world_size"], result.machine["cpu_cores"]
    return quiet.disturbances(
        result.loads["before"], result.loads.get("after"), cores=cores, ranks=ranks
    )


def _rows_of(view: Row, rows: list[Row]) -> list[Row]:
    where = view["where"]
    return [
        row
        for row in rows
        if view["y"] in row and all(row.get(name) == value for name, value in where.items())
    ]


def _unique(rows: list[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _table(view: Row, shape: str, every: list[Row], starred: bool) -> str:
    """x down, series across; times with their quartiles."""
    rows = [row for row in every if row["shape"] == shape]
    series, unit = _unique(rows, view["series"]), unit_of(view, every)
    cells = {(row[view["x"]], row[view["series"]]): _cell(view, row, starred, unit) for row in rows}
    prefix = "" if view["series"] == "candidate" else f"{view['series']} "
    header = [view["x"], *(f"{prefix}{name}" for name in series)]
    lines = [(x, *(cells.get((x, name), "") for name in series)) for x in _unique(rows, view["x"])]
    return f"{shape}{unit.behind}:\n\n{text.table(header, lines)}"


def _cell(view: Row, row: Row, starred: bool, unit: Unit) -> str:
    if ends := ends_of(view, [row]):
        star = " \\*" if starred and row.get("graph") is False else ""
        return text.spread(*(row[name] / unit.size for name in (view["y"], *ends))) + star
    value = row[view["y"]]
    return text.size(value) if "bytes" in view["y"] else text.three(value / unit.size)


def _wins_and_losses(rows: list[Row]) -> list[str]:
    """Against the best baseline of the same point, losses first and one by one."""
    compared = [row for row in rows if "over_best_baseline" in row]
    if not compared:
        return []
    losses = [row for row in compared if row["over_best_baseline"] >= 1]
    lines = [
        f"## Where tpsample is not faster: {len(losses)} of {len(compared)} points\n",
        *(
            f"- {_point(row)}: {row['candidate']} takes {_ratio(row)} times as long as "
            f"{row['best_baseline']}"
            for row in losses
        ),
    ]
    wins = [row for row in compared if row["over_best_baseline"] < 1]
    lines += [f"\n## Where tpsample is faster: {len(wins)} of {len(compared)} points\n"]
    lines += [
        f"- {_point(row)}: {row['candidate']} takes {_ratio(row)} of the time of "
        f"{row['best_baseline']}"
        for row in wins
    ]
    return ["\n".join(lines)]


def _ratio(row: Row) -> str:
    return text.three(row["over_best_baseline"])


def _point(row: Row) -> str:
    ranks = f", {row['world_size']} ranks" if "world_size" in row else ""
    return f"{row['shape']}, batch {row['batch']}{ranks}"


def _inputs(result: Result) -> list[str]:
    if not result.inputs:
        return []
    columns = ("name", "value", "low", "high", "unit", "kind", "source")
    names = tuple(name for name in columns if name in result.inputs[0])
    rows = [[text.cell(each[name]) for name in names] for each in result.inputs]
    return ["## Inputs", text.table(names, rows, right=len(names))]


def _provenance(result: Result) -> list[str]:
    eager = any(row.get("graph") is False for row in result.rows)
    notes = list(result.notes)
    if eager and result.machine["hardware"] != "CPU":
        notes.append("\\* not captured in a CUDA graph: the host's time is included.")
    checks = result.checks
    lines = [
        f"- {checks['rows_compared']} rows of ids were compared with the oracle before timing; "
        f"{checks['near_ties']} differed within a near tie{_gap(checks)}, none otherwise."
        if not result.aborted
        else "- The comparison with the oracle failed.",
        "- Cells are median (first–third quartile); the candidates took turns, "
        f"{result.settings['repeats']} times each.",
        *(f"- {note}" for note in notes),
    ]
    facts = {**result.machine, **result.measured}
    rows = [(name, text.cell(value)) for name, value in facts.items() if value is not None]
    for when, load in result.loads.items():
        rows.append((f"load {when} (1, 5, 15 min)", quiet.shown(load)))
    table = text.table(("what", "value"), rows, right=2)
    return ["## Notes", "\n".join(lines), "## Machine", table]


def _gap(checks: dict[str, float]) -> str:
    gap = checks.get("largest_gap", 0.0)  # older results do not have it
    return f" (the oracle's two scores at most {gap:.2g} apart)" if gap else ""


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1])))
