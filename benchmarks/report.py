"""A result as a Markdown page with plots: a pure function of its JSON.

python -m benchmarks.report benchmarks/results/single_gpu-h200-2026-11-21
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.results import Result

RESULT = "result.json"
PAGE = "README.md"

Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Write the page and the plots of the result in `folder`; the page's path."""
    result = Result.load(folder / RESULT)
    sections = [f"# {result.benchmark}", result.question, *_warnings(result)]
    for view in result.views:
        rows = _rows_of(view, result.rows)
        if not rows:
            continue
        plot = _plot(view, rows, folder, result.machine["hardware"])
        sections.append(f"## {view['title']}")
        if plot is not None:
            sections.append(f"![{view['title']}]({plot})")
        sections += [_table(view, shape, rows) for shape in _unique(rows, "shape")]
    sections += [*_wins_and_losses(result.rows), *_inputs(result), *_provenance(result)]
    page = folder / PAGE
    page.write_text("\n\n".join(sections) + "\n")
    return page


def _warnings(result: Result) -> list[str]:
    lines = []
    if result.aborted:
        lines.append(f"**Aborted, the numbers are void: {result.aborted}**")
    if result.settings["tiny"]:
        lines.append("**Tiny sizes: this run shows that the benchmark works, not how fast it is.**")
    if result.machine["hardware"] == "CPU":
        lines.append("**CPU: these times say nothing about a GPU.**")
    if result.machine["triton_interpreter"]:
        lines.append("**The kernels ran in the Triton interpreter.**")
    return lines


def _rows_of(view: Row, rows: list[Row]) -> list[Row]:
    where = view["where"]
    return [
        row
        for row in rows
        if view["y"] in row and all(row.get(name) == value for name, value in where.items())
    ]


def _unique(rows: list[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _table(view: Row, shape: str, rows: list[Row]) -> str:
    """x down, series across; times with their quartiles."""
    rows = [row for row in rows if row["shape"] == shape]
    series = _unique(rows, view["series"])
    cells = {(row[view["x"]], row[view["series"]]): _cell(view["y"], row) for row in rows}
    prefix = "" if view["series"] == "candidate" else f"{view['series']} "
    lines = [
        f"{shape}:\n",
        _line([view["x"], *(f"{prefix}{name}" for name in series)]),
        _line(["---:"] * (1 + len(series))),
    ]
    for x in _unique(rows, view["x"]):
        lines.append(_line([x, *(cells.get((x, name), "") for name in series)]))
    return "\n".join(lines)


def _cell(y: str, row: Row) -> str:
    if y == "median_us" and "q1_us" in row:
        eager = "" if row["graph"] else " *"
        return f"{row[y]:.1f} ({row['q1_us']:.1f}–{row['q3_us']:.1f}){eager}"
    return f"{row[y]:.3g}"


def _wins_and_losses(rows: list[Row]) -> list[str]:
    """Against the best baseline of the same point, losses first and one by one."""
    compared = [row for row in rows if "over_best_baseline" in row]
    if not compared:
        return []
    losses = [row for row in compared if row["over_best_baseline"] >= 1]
    lines = [
        f"## Where tpsample is not faster: {len(losses)} of {len(compared)} points\n",
        *(
            f"- {_point(row)}: {row['candidate']} takes {row['over_best_baseline']:.2f} times "
            f"as long as {row['best_baseline']}"
            for row in losses
        ),
    ]
    wins = [row for row in compared if row["over_best_baseline"] < 1]
    lines += [f"\n## Where tpsample is faster: {len(wins)} of {len(compared)} points\n"]
    lines += [
        f"- {_point(row)}: {row['candidate']} takes {row['over_best_baseline']:.2f} of the time "
        f"of {row['best_baseline']}"
        for row in wins
    ]
    return ["\n".join(lines)]


def _point(row: Row) -> str:
    ranks = f", {row['world_size']} ranks" if "world_size" in row else ""
    return f"{row['shape']}, batch {row['batch']}{ranks}"


def _inputs(result: Result) -> list[str]:
    if not result.inputs:
        return []
    names = ("name", "value", "unit", "kind", "source")
    lines = [_line(names), _line(["---"] * len(names))]
    lines += [_line([_short(each[name]) for name in names]) for each in result.inputs]
    return ["## Inputs", "\n".join(lines)]


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
        "- Cells are median (first–third quartile) of "
        f"{result.settings['repeats']} interleaved repeats.",
        *(f"- {note}" for note in notes),
    ]
    facts = {**result.machine, **result.measured}
    table = [_line(["what", "value"]), _line(["---", "---"])]
    table += [_line([name, _short(value)]) for name, value in facts.items() if value is not None]
    return ["## Notes", "\n".join(lines), "## Machine", "\n".join(table)]


def _gap(checks: dict[str, float]) -> str:
    gap = checks.get("largest_gap", 0.0)  # older results do not have it
    return f" (the oracle's two scores at most {gap:.2g} apart)" if gap else ""


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\n", "<br>").replace("|", "\\|")


def _plot(view: Row, rows: list[Row], folder: Path, hardware: str) -> str | None:
    """The view as PNG beside the page; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = _unique(rows, "shape")
    figure, axes = plt.subplots(
        1, len(shapes), figsize=(4.6 * len(shapes), 4.0), squeeze=False, layout="constrained"
    )
    for axis, shape in zip(axes[0], shapes, strict=True):
        for name in _unique(rows, view["series"]):
            points = [r for r in rows if r["shape"] == shape and r[view["series"]] == name]
            points.sort(key=lambda row: row[view["x"]])
            x = [row[view["x"]] for row in points]
            line = axis.plot(x, [row[view["y"]] for row in points], marker="o", label=str(name))
            if view["y"] == "median_us" and all("q1_us" in row for row in points):
                low, high = ([row[q] for row in points] for q in ("q1_us", "q3_us"))
                axis.fill_between(x, low, high, color=line[0].get_color(), alpha=0.2)
        if view["reference"] is not None:
            axis.axhline(view["reference"], color="black", linewidth=0.8, linestyle="--")
        ticks = _unique([r for r in rows if r["shape"] == shape], view["x"])
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        if view["y"].endswith("_us") and all(row[view["y"]] > 0 for row in rows):
            axis.set_yscale("log")
        axis.set(title=shape, xlabel=view["x"].replace("_", " "), ylabel=view["title"])
        axis.grid(alpha=0.3)
    axes[0][-1].legend(title=view["series"], fontsize="small")
    figure.suptitle(hardware)
    path = folder / f"{view['name']}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1])))
