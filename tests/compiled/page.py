"""The outcome of a run on emulated GPUs as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import text
from tests.compiled.coverage import Covered, by_reason, merged


def write_page(folder: Path, parts: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write what came of the parts, and `benchmarks.lab.machine.describe` of the machine."""
    sections = [
        "# Compiled kernels on emulated GPUs",
        "The PTX of the kernels was executed on a CPU. Nothing ran on a GPU, and no figure is a "
        "time of one.",
        "## What ran",
        _verdicts(parts),
    ]
    for arch in sorted({part["arch"] for part in parts}):
        of_arch = [part for part in parts if part["arch"] == arch]
        sections += _coverage(arch, of_arch)
    cells = [(name, text.cell(value)) for name, value in facts.items() if value is not None]
    sections += ["## Machine", text.table(("name", "value"), cells, right=2)]
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{name: part[name] for name in part if name != "coverage"} for part in parts]
    (folder / "result.json").write_text(json.dumps({**facts, "parts": kept}, indent=1) + "\n")
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _verdicts(parts: Sequence[dict[str, Any]]) -> str:
    header = (
        *("part", "rows", "wrong", "near ties", "score error, of its bound", "doubts"),
        *("launches", "kernels", "thread instructions", "processor s"),
    )
    rows = []
    for part in sorted(parts, key=lambda part: (part["arch"], part["part"])):
        name = f"{'ended: ' * ('fault' in part)}sm_{part['arch']} {part['part']}"
        error = f"{part['error']:.2g}, {part['of_bound']:.2f}" if part.get("error") else ""
        counts = [part.get(name, "") for name in ("rows", "wrong", "near_ties")]
        launches = sum(part["launches"].values()), len(part["launches"])
        work = text.three(part.get("instructions", 0)), round(part["processor_s"])
        rows.append((name, *counts, error, len(part["doubts"]), *launches, *work))
    return text.table(header, rows, right=1)


def _coverage(arch: int, parts: Sequence[dict[str, Any]]) -> list[str]:
    kernels: dict[str, Covered] = merged(part["coverage"] for part in parts)
    rows, left = [], []
    for name in sorted(kernels):
        texts, outcomes = kernels[name]["texts"].values(), kernels[name]["outcomes"]
        came = sum(bool(times) for times in outcomes.values())
        ran = f"{sum(ran for _, ran in texts)} of {sum(count for count, _ in texts)}"
        rows.append((name, len(texts), ran, f"{came} of {len(outcomes)}"))
        left += [(name, reason, " ".join(of)) for reason, of in by_reason(outcomes).items()]
    return [
        f"## Coverage on sm_{arch}",
        "Instructions of all PTX texts of a kernel; by line of the source and opcode whether it "
        "ran, and both outcomes of a predicate, in one of the texts.",
        text.table(
            ("kernel", "texts", "instructions that ran", "outcomes that came"), rows, right=1
        ),
        f"Outcomes that never came on sm_{arch}, and why:",
        text.table(("kernel", "reason", "where"), left, right=3),
    ]
