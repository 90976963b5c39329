"""The page of a scaling record: what it shows, where tpsample loses, and how far to trust it.

python -m benchmarks.scaling.page FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import quiet, text
from benchmarks.scaling import pictures
from benchmarks.scaling.candidates import FAMILIES, SAMPLERS
from benchmarks.scaling.pictures import at, unique
from benchmarks.scaling.record import RECORD, Record, Row
from benchmarks.scaling.sessions import disturbances

PAGE = "README.md"


def write_page(folder: Path) -> Path:
    """Write the page and the pictures of the record in `folder`; the page's path."""
    record = Record.load(folder / RECORD)
    drawn = pictures.draw(record, folder)
    rows = list(record.rows())
    sections = ["# Tokens per second over the number of ranks", *_warnings(record)]
    sections += _losses(rows)
    for shape in unique(rows, "shape"):
        sections.append(f"## {shape}")
        sections += [f"![{_title(file)}]({file})" for file in drawn.get(shape, [])]
        for mode in unique(rows, "mode"):
            if own := at(rows, shape=shape, mode=mode):
                sections += [f"### {shape}, {mode}", *_tables(own)]
    sections += [*_who(rows), *_left_out(record), *_provenance(record)]
    page = folder / PAGE
    page.write_text("\n\n".join(sections) + "\n")
    return page


def _title(file: str) -> str:
    return file.removesuffix(".png").replace("-", " ")


def _warnings(record: Record) -> list[str]:
    machine, settings = record.machine, record.settings
    ranks, lines = max(settings.world_sizes), quiet.warning(disturbances(record))
    if settings.tiny:
        lines.append("**Tiny sizes: this run shows that the benchmark works, not how fast it is.**")
    if machine["hardware"] == "CPU":
        lines.append("**CPU: these times say nothing about a GPU.**")
        if ranks * settings.threads > machine["cpu_cores"]:
            lines.append(
                f"**Up to {ranks} ranks of {settings.threads} threads shared "
                f"{machine['cpu_cores']} cores: more ranks than cores cannot be faster.**"
            )
    if machine["triton_interpreter"]:
        lines.append("**The kernels ran in the Triton interpreter.**")
    missing = {w: len(found) for w in settings.world_sizes if (found := record.missing(w))}
    if missing:
        each = ", ".join(f"{number} of W = {w}" for w, number in missing.items())
        lines.append(f"**Not complete: points are missing ({each}); the same command goes on.**")
    failed = [line for session in record.sessions for line in session.get("failed", [])]
    return [*lines, *(f"**{line}**" for line in dict.fromkeys(failed))]


def _losses(rows: list[Row]) -> list[str]:
    """Where tpsample is slower than the best baseline of the same point; then where it is not."""
    compared = [row for row in rows if "over_best_baseline" in row]
    if not compared:
        return []
    compared.sort(key=lambda row: -row["over_best_baseline"])
    slower = [row for row in compared if row["over_best_baseline"] >= 1]
    faster = [row for row in compared if row["over_best_baseline"] < 1]
    sections = []
    for title, found in (("loses", slower), ("wins", faster)):
        sections.append(f"## Where tpsample {title}: {len(found)} of {len(compared)} points")
        if found:
            header = ("times as long", "as", "shape", "requests", "W", "B")
            sections.append(text.table(header, map(_compared, found), right=len(header)))
    return sections


def _compared(row: Row) -> tuple[object, ...]:
    ratio = text.three(row["over_best_baseline"])
    where = (row["shape"], row["mode"], row["world_size"], row["batch"])
    return (ratio, row["best_baseline"], *where)


def _tables(rows: list[Row]) -> Iterator[str]:
    """A shape and mode: tokens per second, then all times, then bytes."""
    best = pictures.fastest(rows)
    unit, us = text.unit_of_time(row["q3_us"] for row in rows)
    mixed = any(row["graph"] for row in rows) and not all(row["graph"] for row in rows)

    def time(row: Row) -> str:
        star = " \\*" if mixed and not row["graph"] else ""
        return text.spread(*(row[name] / us for name in ("median_us", "q1_us", "q3_us"))) + star

    yield "Tokens per second, each exchange with its fastest sampler:"
    yield _grid(best, "family", lambda row: text.three(row["tokens_per_s"]))
    star = "; \\* without a CUDA graph, the host's time included" if mixed else ""
    yield f"Time of a step on the slowest rank, {unit}: median (first–third quartile){star}:"
    for alone in (True, False):
        if own := [row for row in rows if (row["world_size"] == 1) == alone]:
            yield _grid(own, "candidate", time)
    if own := [row for row in best if row["bytes_sent"]]:
        yield "What a rank sends in a step:"
        yield _grid(own, "family", lambda row: text.size(row["bytes_sent"]))


def _grid(rows: list[Row], across: str, cell: Callable[[Row], str]) -> str:
    """W and B down, families or candidates across."""
    names = unique(rows, across)
    points = sorted({(row["world_size"], row["batch"]) for row in rows})
    found = {(row["world_size"], row["batch"], row[across]): cell(row) for row in rows}
    lines = [(*point, *(found.get((*point, name), "") for name in names)) for point in points]
    return text.table(("W", "B", *names), lines)


def _who(rows: list[Row]) -> list[str]:
    families = [name for name in FAMILIES if at(rows, family=name)]
    lines = [f"- **{name}**: {FAMILIES[name]}." for name in families]
    lines += [
        f"- **… + {name}**: {whose}."
        for name, whose in SAMPLERS.items()
        if any(row["candidate"].split(" + ", 1)[-1] == name for row in rows)
    ]
    lines.append("- Requests: temperature 1 in all rows, with the filter that a heading names.")
    return ["## Who is who", "\n".join(lines)]


def _left_out(record: Record) -> list[str]:
    found = [(point, each) for point in record.points for each in point["left_out"]]
    if not found:
        return []
    header = ("candidate", "why", "shape", "requests", "W", "B")
    rows = [
        (
            each["candidate"],
            text.cell(each["why"]),
            p["shape"],
            p["mode"],
            p["world_size"],
            p["batch"],
        )
        for p, each in found
    ]
    return ["## Left out, because it was wrong or did not run", text.table(header, rows, right=6)]


def _provenance(record: Record) -> list[str]:
    checks = [point["checks"] for point in record.points]
    on_cpu = record.machine["hardware"] == "CPU"
    lines = [
        f"- {sum(each['rows_compared'] for each in checks)} rows of tpsample's ids were compared "
        "with the oracle before a time counted, and again with the timed steps; "
        f"{sum(each['near_ties'] for each in checks)} differed within a near tie.",
        "- Baselines draw noise of their own: their logits were compared with the product of the "
        "whole weight, and their ids with what the request allows.",
        f"- All candidates of a point took turns in the same processes, "
        f"{record.settings.repeats} times each; of several ranks the slowest counts.",
        f"- Threads per rank, for every W: {record.settings.threads}. On a CPU tpsample finds "
        "what can win by an fp32 product and computes that in float64; rows with top_p alone are "
        "computed in float64 altogether. Baselines multiply in bf16."
        if on_cpu
        else "- Steps are replays of a CUDA graph with a cold L2, unless marked.",
        *(f"- {note}" for note in record.notes),
    ]
    sessions = [
        (
            s["started"],
            s.get("ended", "killed"),
            quiet.shown(s["before"]),
            quiet.shown(s.get("after")),
            s["command"],
        )
        for s in record.sessions
    ]
    header = ("started", "ended", "load before (1, 5, 15 min)", "load after", "command")
    facts = [(k, text.cell(v)) for k, v in record.machine.items() if v is not None]
    return [
        *("## Notes", "\n".join(lines)),
        *("## Sessions", text.table(header, sessions, right=5)),
        *("## Machine", text.table(("what", "value"), facts, right=2)),
    ]


if __name__ == "__main__":
    print(write_page(Path(sys.argv[1])))
