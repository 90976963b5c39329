"""Why an instruction never ran, or a predicate never had an outcome."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton.language

import tpsample.backends.triton_.kernels
from tests.compiled.coverage import merged

UNKNOWN = "nobody knows"
_BEHIND = "it stands behind a loop that is never empty"
_FINITE = "the logarithm of a mantissa is that of no infinity"
_REASONS = (
    (r"range\(.* \| (bra, holds|bra.uni, runs|mov|setp)", "a loop is never empty"),
    (r"tl.store\((status|words|decided)_ptr \+ .* \| (cvt|and|or|mov)", _BEHIND),
    (r"status = tl.where.* \| mov", _BEHIND),
    (r"tl.load\((temperature|seed|position)_ptr.* fails", "rows of the screen have a program each"),
    (r"mask=offs_block < blocks", "no run has over 2048 ids where logits are stored"),
    (r"if first_row \+ HALF <", "up to 256 rows fill over half of a tile that is split"),
    (r"tl.dot\(.* \| bra.uni, holds", "products are over once their mbarrier is asked"),
    (r"temperature = tl.where\(tl.load\(processed_ptr.* \| (cvt|mov)", _BEHIND),
    (r"log2\(mantissa\).* \| bra, fails", _FINITE),
    (r"laws.py:0 .* \| fma.rn.ftz", _FINITE),
)
"""A pattern of the source line, the opcode and the outcome, and the reason."""
_FOLDERS = tuple(
    Path(module.__file__).parent
    for module in (tpsample.backends.triton_.kernels, triton.language)
    if module.__file__
)


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
    for outcome in (outcome for outcome, times in outcomes.items() if not times):
        place, how = outcome.split(", ", 1)
        name, number = place.split(":")
        lines = (linecache.getline(str(folder / name), int(number)) for folder in _FOLDERS)
        text = f"{place} {''.join(lines).strip()} | {how}"
        reasons = (reason for pattern, reason in _REASONS if re.search(pattern, text))
        found.setdefault(next(reasons, UNKNOWN), []).append(outcome)
    return found
