"""Says where the ranks' calls differ: in which row, in which field, with every rank's value.

temperatures: row 1: must be the same on every rank, got rank 0: 0.5, rank 1: 0.25
"""

from __future__ import annotations

from typing import Any

_SAME = "must be the same on every rank"
_EXPECTED = {
    "call": "every rank must make the same call",
    "hidden_states rows": _SAME,
    "num_samples": _SAME,
    "rows without a seed": f"{_SAME}, and so must be how many seeds were drawn before",
    "positions": f"{_SAME}; a rank that skipped a step has others",
    "seeds": _SAME,
    "temperatures": _SAME,
    "token_ids": _SAME,
    "tokens so far": f"{_SAME}, by digest; every rank appends the same tokens as often",
}
"""What is expected of a part of a call; of others, which have no entry, ranks see digests alone."""


def difference(name: str, values: list[int], texts: list[dict[str, Any]]) -> str:
    """Return a message about the part `name` of a call, which is not the same on all ranks.

    Args:
        values: every rank's number or digest.
        texts: every rank's `Call.texts`, in which lists have an entry per row.
    """
    shown: list[Any] = [text.get(name) for text in texts]
    if name == "batch":
        return _in_batch(shown)
    expected = _EXPECTED.get(name, f"{_SAME}, by digest")
    if all(isinstance(each, list) for each in shown):
        for row, of_ranks in enumerate(zip(*shown, strict=False)):
            if any(each != of_ranks[0] for each in of_ranks):
                return f"{name}: row {row}: {expected}, got {_each(of_ranks)}"
    if name not in texts[0]:
        shown = list(values)
    return f"{name}: {expected}, got {_each(shown)}"


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
