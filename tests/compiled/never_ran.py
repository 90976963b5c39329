"""Why an instruction never ran, or a predicate never had an outcome."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import triton.language

import tpsample.kernels

UNKNOWN = "nobody knows"
_REASONS = (
    (r"for sample in range\(", "a row has at least one sample"),
    (r"for source in range\(", "there is at least one source of words"),
)
"""A pattern of the source line, the opcode and the outcome, and the reason."""
_FOLDERS = tuple(
    Path(module.__file__).parent
    for module in (tpsample.kernels, triton.language)
    if module.__file__
)


def by_reason(outcomes: dict[str, int]) -> dict[str, list[str]]:
    """Return the outcomes that never came, as file:line, opcode and outcome, by the reason."""
    found: dict[str, list[str]] = {}
    for outcome in (outcome for outcome, times in outcomes.items() if not times):
        place, how = outcome.split(", ", 1)
        name, number = place.split(":")
        lines = (linecache.getline(str(folder / name), int(number)) for folder in _FOLDERS)
        text = f"{''.join(lines).strip()} | {how}"
        reasons = (reason for pattern, reason in _REASONS if re.search(pattern, text))
        found.setdefault(next(reasons, UNKNOWN), []).append(outcome)
    return found
