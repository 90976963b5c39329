"""The numbers that a run on one GPU is for, and which of them it has read.

A benchmark gives a goal its number as soon as the points are measured, whatever becomes of the rest
of its section. The list also has the numbers that one GPU cannot show, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
FLASHINFER = "FlashInfer"
TARGET_SHAPES = ("128256x8192", "151936x4096")


@dataclass(frozen=True)
class Goal:
    """One number.

    Attributes:
        section: of the GPU check; "" is none, because one GPU cannot show it.
        target: the most that the number should be.
        points: how many rows are needed; fewer are named.
        rows: whether a row of the section's result counts.
        value: the column of the number.
        against: a candidate, by whose time at the same point the row's is divided instead.
        fact: of the section, which is the number; then no row counts.
        why: the reason that it is not read, where no row has it.
    """

    name: str
    section: str
    target: float
    points: int = 0
    rows: Callable[[Row], bool] = lambda row: False
    value: str = "over_limit"
    against: str = ""
    fact: str = ""
    why: str = "no point of it was measured"


def _ours(batches: Iterable[int], world_size: int = 1, name: str = "") -> Callable[[Row], bool]:
    return lambda row: (
        row["kind"] == "tpsample"
        and row["batch"] in batches
        and row.get("world_size", 1) == world_size
        and row["shape"] in TARGET_SHAPES
        and name in ("", row["candidate"])
    )


def _filtered(row: Row) -> bool:
    return row["kind"] == "tpsample" and bool(row["graph"])


SMALL = (1, 16, 32, 64)
_NO_FLASHINFER = "FlashInfer did not take part; over_best_baseline has the other samplers"
_NO_LINK = "one GPU has no link: needs 8 GPUs and benchmarks.run exchange"
_RANDOM = "random weights here: see benchmarks.run screen_candidates"
_HEAD, _SHARD = _ours((1, 16), 1, "screened"), _ours((1, 16), 8, "screened")
GOALS = (
    Goal("plain step ÷ limit, B ≤ 64", "single_gpu", 1.10, 8, _ours(SMALL)),
    *(
        Goal(
            *(f"plain step ÷ (cuBLAS + FlashInfer), B = {batch}", "single_gpu", 0.95, 2),
            _ours((batch,)),
            against=FLASHINFER,
            why=_NO_FLASHINFER,
        )
        for batch in (128, 256)
    ),
    Goal("one of 8 shards ÷ limit, B ≤ 64", "shard", 1.20, 8, _ours(SMALL, 8)),
    Goal(
        *("filtered ÷ plain step in a graph, B ≤ 64", "filters", 1.10, 12, _filtered),
        value="over_plain",
    ),
    Goal("screened ÷ limit, whole head, B ≤ 16", "screened", 0.60, 4, _HEAD),
    Goal("screened ÷ limit, one of 8 shards, B ≤ 16", "screened", 0.85, 4, _SHARD),
    Goal("launches of a plain step, several ranks", "features", 2, fact="launches"),
    Goal("allocations and waits of a step", "features", 0, fact="allocations and waits"),
    Goal("exchange tail, W = 8, µs", "", 6, why=_NO_LINK),
    Goal("candidates per row of a screened step, real rows", "", 8, why=_RANDOM),
)


def goals_read(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every goal with its target and what was found: "read: …" or "not read: …"."""
    return [
        {"goal": goal.name, "target": goal.target, "found": _found(goal, sections)}
        for goal in GOALS
    ]


def _found(goal: Goal, sections: dict[str, Any]) -> str:
    section = sections.get(goal.section, {})
    facts = section.get("facts", {})
    if goal.fact in facts:
        return f"read: {facts[goal.fact]}"
    if goal.section and not section:
        return f"not read: {goal.section} did not run"
    values = {}
    for row in facts.get("rows", []):
        if goal.rows(row) and (value := _value(goal, row, facts["rows"])) is not None:
            values[f"{row['candidate']}, {row['shape']}, B = {row['batch']}"] = value
    if not values:
        return f"not read: {goal.why}"
    worst = max(values, key=lambda point: values[point])
    missing = "" if len(values) >= goal.points else f"; {len(values)} of {goal.points} points"
    return f"read: {values[worst]:.3g} at worst ({worst}){missing}"


def _value(goal: Goal, row: Row, rows: list[Row]) -> float | None:
    if not goal.against:
        return row.get(goal.value)
    same = ("shape", "batch")
    for other in rows:
        if other["candidate"] == goal.against and all(row[n] == other[n] for n in same):
            return float(row["median_us"] / other["median_us"])
    return None
