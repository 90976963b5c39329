"""Why an instruction never ran, or a predicate never had an outcome."""

from __future__ import annotations


def by_reason(outcomes: dict[str, int]) -> dict[str, list[str]]:
    """Return the outcomes that never came, as file:line, opcode and outcome, by the reason."""
    found: dict[str, list[str]] = {}
    for outcome, times in outcomes.items():
        if not times:
            found.setdefault("?", []).append(outcome)
    return found
