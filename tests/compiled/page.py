"""The outcome of a run on emulated GPUs as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import text
from tests.compiled.coverage import Covered, merged, never_ran

_MOST = 40
"""Source lines that never ran and are named, of each kernel."""


def write_page(folder: Path, parts: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write what came of the parts, and `benchmarks.lab.machine.describe` of the machine."""
    archs = sorted({part["arch"] for part in parts})
    sections = [
        "# Compiled kernels on emulated GPUs",
        "The PTX of the kernels was executed on a CPU. Nothing ran on a GPU, and no figure is a "
        "time of one.",
        "## What ran",
        _verdicts(parts),
    ]
    for arch in archs:
        of_arch = [part for part in parts if part["arch"] == arch]
        sections += [
            *_counts(arch, of_arch),
            *_coverage(arch, merged(p["coverage"] for p in of_arch)),
        ]
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


def _counts(arch: int, parts: Sequence[dict[str, Any]]) -> list[str]:
    tables = [table for part in parts for table in part.get("tables", ())]
    if not tables:
        return []
    kinds = dict.fromkeys(kind for table in tables for kind in table["per_logit"])
    cells = [[kind, *(f"{t['per_logit'].get(kind, 0):.2f}" for t in tables)] for kind in kinds]
    cells.append(["all", *(f"{sum(t['per_logit'].values()):.1f}" for t in tables)])
    header = ("instructions", *(f"B = {t['rows']}" for t in tables))
    sections = [
        f"## A plain step on sm_{arch}",
        "Thread instructions per logit of the padded tile, bf16, V = 2048, D = 512:",
        text.table(header, cells, right=1),
        "Every 4 bytes of the weight are read once, no more is prefetched than there is, and no "
        "access of shared memory has a bank conflict: the run ends where one of these is not so.",
    ]
    for table in tables[-1:]:
        rows = [
            (a["opcode"], a["tensor"], a["bytes"], a["bytes_per_thread"],
             f"{a['sector_bytes_per_byte']:.2f}") for a in table["accesses"]
        ]  # fmt: skip
        header = ("access", "tensor", "bytes", "bytes a thread", "bytes of sectors per byte")
        sections += [f"Accesses of B = {table['rows']}:", text.table(header, rows, right=2)]
    return sections


def _coverage(arch: int, kernels: dict[str, Covered]) -> list[str]:
    header = (
        "kernel",
        "texts",
        "instructions that ran",
        "outcomes of predicates",
        "source lines that never ran",
    )
    rows = []
    for name in sorted(kernels):
        texts, left = kernels[name]["texts"].values(), never_ran(kernels[name])
        more = f" and {len(left) - _MOST} more" if len(left) > _MOST else ""
        shares = [
            f"{sum(t[f'{of}_ran'] for t in texts)} of {sum(t[of] for t in texts)}"
            for of in ("lines", "branches")
        ]
        rows.append((name, len(texts), *shares, " ".join(left[:_MOST]) + more))
    return [
        f"## Coverage on sm_{arch}",
        "Of all PTX texts of a kernel; a source line ran if it ran in one of them.",
        text.table(header, rows, right=len(header)),
    ]
