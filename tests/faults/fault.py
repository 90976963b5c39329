"""A planted fault: one line of the package, and the line that replaces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    Attributes:
        name: for `--only`.
        file: relative to the root of the repository.
        old: what the file has exactly once.
        new: what the fault puts in its place.
        tests: pytest's names of the tests that must notice it, few and fast.
        equivalent: why nothing can notice it; "" if something must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""
