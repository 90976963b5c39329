"""A planted fault, a change of one file, and the tables that list them."""

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


def faults(table: str) -> list[Fault]:
    """Read a table of faults.

    A line that is not indented has the changed file and the file of the tests, for all faults up to
    the next one. An indented line without a mark begins a fault and is its name; "-" marks the old
    lines, "+" the new ones, ">" a test (without any, the file of tests is run), and "=" the reason
    why a fault is equivalent:

        tpsample/core/word.py tests/core/test_word.py
            a word is one too large
            - return key << 32
            + return (key << 32) + 1
            > test_golden
    """
    rows: list[tuple[str, str, str, dict[str, list[str]]]] = []
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            file, file_of_tests = line.split()
        elif line[4:6].strip() in "-+>=":
            rows[-1][-1][line[4]].append(line[6:])
        else:
            rows.append((line.strip(), file, file_of_tests, {mark: [] for mark in "-+>="}))
    return [
        Fault(
            name,
            file,
            old="\n".join(parts["-"]),
            new="\n".join(parts["+"]),
            tests=tuple(f"{tests}::{test}" for test in parts[">"]) or (tests,),
            equivalent=" ".join(parts["="]),
        )
        for name, file, tests, parts in rows
    ]
