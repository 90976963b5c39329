"""Says where the ranks' calls differ: in which row, in which field, with every rank's value.

temperatures: row 1: must be the same on every rank, got rank 0: 0.5, rank 1: 0.25
"""

from __future__ import annotations

from typing import Any

_SAME = "must be the same on every rank"
_EXPECTED = {
    "call": "every rank must make the same call",
    "rows without a seed": f"{_SAME}, and so must be how many seeds were drawn before",
    "positions": f"{_SAME}; a rank that skipped a step has others",
    "tokens so far": f"{_SAME}, by digest; every rank appends the same tokens as often",
}
"""The expectation that a message prints of a part; parts without an entry must be the same."""

_WIDE = 8
"""Numbers of a row that a message shows together."""


def difference(texts: list[dict[str, Any]]) -> str:
    """Return a message about the first part of a call that is not the same on all ranks.

    Args:
        texts: every rank's `Call.texts`, in which lists have an entry per row.
    """
    for name in texts[0]:
        shown: list[Any] = [text.get(name) for text in texts]
        if any(each != shown[0] for each in shown):
            return _in_batch(shown) if name == "batch" else _in_part(name, shown)
    return f"batch: {_SAME}, got other parts of it"


def _in_part(name: str, shown: list[Any]) -> str:
    """Say where the values of a part first differ."""
    expected, where = _EXPECTED.get(name, _SAME), name
    if all(isinstance(each, list) for each in shown):
        where, shown = _first(f"{name}: row", shown)
    if all(isinstance(each, list) and len(each) > _WIDE for each in shown):
        where, shown = _first(f"{where}, column", shown)
    return f"{where}: {expected}, got {_each(shown)}"


def _first(of: str, lists: list[list[Any]]) -> tuple[str, list[Any]]:
    """Return the name and the values of the first entry in which lists differ."""
    for place, values in enumerate(zip(*lists, strict=False)):
        if any(each != values[0] for each in values):
            return f"{of} {place}", list(values)
    return f"{of}s", [len(each) for each in lists]


def _in_batch(plans: list[list[str]]) -> str:
    """Say in which row, and in which of its fields, the ranks' requests first differ."""
    for lines in zip(*plans, strict=False):
        if len(set(lines)) > 1:
            row, _, first = lines[0].partition(": ")
            fields = [dict(_fields(line.partition(": ")[2])) for line in lines]
            for field in dict(_fields(first)):
                values = [of_rank.get(field) for of_rank in fields]
                if len(set(values)) > 1:
                    return f"batch: {row}: {field}: {_SAME}, got {_each(values)}"
            return f"batch: {_SAME}, got {_each(lines)}"
    return f"batch: {_SAME}, got batches of {_each([len(plan) for plan in plans])} lines"


def _fields(line: str) -> list[tuple[str, str]]:
    """Return the fields of a line such as ``temperature=1.0, top_k=0``; values may have commas."""
    found: list[tuple[str, str]] = []
    for part in line.split(", "):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            found.append((name, value))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}, {part}")
    return found


def _each(values: Any) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
