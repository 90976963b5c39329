"""A planted fault, a change of one file, and the tables that list them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    Attributes:
        name: for `--only`.
        file: relative to the root of the repository.
        old: what the file has exactly once.
        new: what the fault puts in its place.
        tests: pytest's names of the tests that must notice it, few and fast.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def faults(table: str) -> list[Fault]:
    """Read a table of faults.

    A line that is not indented has the changed file, for all faults up to the next one. An indented
    line without a mark begins a fault and is its name; "-" marks the old lines, "+" the new ones,
    and ">" a test. A test stands behind its file where its name alone does not say which it is. A
    fault without a test has those of the fault before it, of the same file:

        tpsample/core/word.py
            a word is one too large
            - return key << 32
            + return (key << 32) + 1
            > test_the_best_score_wins_and_ties_go_to_the_lowest_id
            > core/test_word.py::test_special_scores
    """
    rows: list[tuple[str, str, dict[str, list[str]]]] = []
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            file = line
        elif line[4:6].strip() in "-+>":
            rows[-1][-1][line[4]].append(line[6:])
        else:
            rows.append((line.strip(), file, {mark: [] for mark in "-+>"}))
    found: list[Fault] = []
    for name, file, parts in rows:
        old, new = "\n".join(parts["-"]), "\n".join(parts["+"])
        tests = tuple(map(name_of_test, parts[">"]))
        if not tests and found and found[-1].file == file:
            tests = found[-1].tests
        if not tests:
            raise ValueError(f"{name}: expected a test, it is the first fault of {file}")
        found.append(Fault(name, file, old, new, tests))
    return found


def name_of_test(test: str) -> str:
    """Return pytest's name of a test of a table."""
    if ".py" in test:
        return f"tests/{test}"
    files = [file for file, names in _tests().items() if test.partition("[")[0] in names]
    if len(files) != 1:
        raise ValueError(f"{test}: expected the name of one test, found it in {files}")
    return f"tests/{files[0]}::{test}"


@cache
def _tests() -> dict[str, set[str]]:
    """Return the names of the functions of each file of tests."""
    return {
        str(path.relative_to(TESTS)): set(re.findall(r"^def (\w+)\(", path.read_text(), re.M))
        for path in TESTS.rglob("test_*.py")
    }
