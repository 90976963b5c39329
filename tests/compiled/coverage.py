"""Lines of the kernels' PTX that ran, outcomes of predicates that never came, and why they did not.

An outcome is that of a line of the source, an opcode, and whether the predicate held. It came if it
came in one text of the kernel. Predicates that the compiler sets to a constant are left out.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import triton.language

import tpsample.backends.triton_.kernels
from benchmarks.static.builds import package_kernels
from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import FAILED, HELD, RAN

PACKAGE = {name.split(":")[1] for name in package_kernels()}
"""The kernels of the package."""
OUTCOMES = {"runs": RAN, "holds": HELD, "fails": FAILED}
Covered = dict[str, dict[str, Any]]
"""Of a kernel: by PTX text the instructions and those that ran, and counts of outcomes."""

UNKNOWN = "nobody knows"
_BEHIND = "it stands behind a loop that is never empty"
_FINITE = "the logarithm of a mantissa is that of no infinity"
_ELSEWHERE = "a step that compiles to other instructions runs the line"
_REASONS = (
    (r"range\(.* \| (bra, holds|bra.uni, runs|mov|setp)", "a loop is never empty"),
    (r"middle = least \+ .* \| bra, holds", "a loop is never empty"),
    (r"tl.store\((status|words|decided|own)_ptr \+ .* \| (cvt|and|or|mov)", _BEHIND),
    (r"status = tl.where.* \| mov", _BEHIND),
    (r"tl.load\((temperature|seed|position)_ptr.* fails", "rows of the screen have a program each"),
    (r"if first_row \+ HALF <", "up to 256 rows fill over half of a tile that is split"),
    (r"tl.dot\(.* \| bra.uni, holds", "products are over once their mbarrier is asked"),
    (r"log2\(mantissa\).* \| bra, fails", _FINITE),
    (r"best_scores.py:0 .* \| bra, holds", "a loop is never empty"),
    (r"laws.py:0 .* \| fma.rn.ftz", _FINITE),
    (r"bins.py:0 .* \| bra", "a list of one word leaves nothing to halve"),
)
"""A pattern of the source line, the opcode and the outcome, and the reason."""
_FOLDERS = tuple(
    Path(module.__file__).parent
    for module in (tpsample.backends.triton_.kernels, triton.language)
    if module.__file__
)


def of_report(gpu: EmulatedGpu) -> dict[str, Covered]:
    """Return the coverage of each kernel, over all texts that it was compiled to."""
    found: dict[str, Covered] = {}
    for digest, seen in gpu.report.coverage.items():
        kernel = gpu.translations[digest].kernel
        if kernel.name not in PACKAGE:
            continue
        own = found.setdefault(kernel.name, {"texts": {}, "outcomes": Counter()})
        own["texts"][digest] = [len(kernel.instructions), int((seen & RAN > 0).sum())]
        moved = (i.operands for i in kernel.instructions if i.name == "mov.pred")
        constant = {to for to, of in moved if of.lstrip("-").isdigit()}
        for i, bits in zip(kernel.instructions, seen.tolist(), strict=True):
            depends = i.guard and i.guard[0] not in constant
            for outcome, bit in OUTCOMES.items() if depends else [("runs", RAN)]:
                own["outcomes"][f"{i.source}, {i.name}, {outcome}"] += bool(bits & bit)
    return found


def merged(parts: Iterable[dict[str, Covered]]) -> dict[str, Covered]:
    """Add up the coverage of several processes; of a text that several ran, the most of one."""
    found: dict[str, Covered] = {}
    for part in parts:
        for kernel, own in part.items():
            all_of = found.setdefault(kernel, {"texts": {}, "outcomes": Counter()})
            all_of["outcomes"].update(own["outcomes"])
            for digest, text in own["texts"].items():
                all_of["texts"][digest] = max(text, all_of["texts"].get(digest, text))
    return found


def unexplained(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the outcomes that never came and have no reason, by architecture and kernel."""
    return [
        f"sm_{arch}: {outcome} in {name}, and no reason is known"
        for arch in dict.fromkeys(part["arch"] for part in parts)
        for name, covered in merged(p["coverage"] for p in parts if p["arch"] == arch).items()
        for outcome in by_reason(covered["outcomes"]).get(UNKNOWN, ())
    ]


def by_reason(outcomes: dict[str, int]) -> dict[str, list[str]]:
    """Return the outcomes that never came, as file:line, opcode and outcome, by the reason."""
    found: dict[str, list[str]] = {}
    ran = {outcome.split(", ")[0] for outcome, times in outcomes.items() if times}
    for outcome in (outcome for outcome, times in outcomes.items() if not times):
        place, how = outcome.split(", ", 1)
        if place in ran and how.endswith(", runs"):  # no branch depends on it
            found.setdefault(_ELSEWHERE, []).append(outcome)
            continue
        name, number = place.split(":")
        lines = (linecache.getline(str(folder / name), int(number)) for folder in _FOLDERS)
        text = f"{place} {''.join(lines).strip()} | {how}"
        reasons = (reason for pattern, reason in _REASONS if re.search(pattern, text))
        found.setdefault(next(reasons, UNKNOWN), []).append(outcome)
    return found
