"""The test vectors of NOISE.md and MASSES.md hold in numpy alone, and the package computes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import masses_checker, noise_checker
from tests.support.modules import imported_modules
from tests.support.vectors import MASSES, NOISE, RESULTS, as_text
from tpsample import noise
from tpsample.core import acceptance, masses

CHECKERS: dict[Path, Any] = {NOISE: noise_checker, MASSES: masses_checker}


@pytest.mark.parametrize(("file", "count"), [(NOISE, 27), (MASSES, 48)])
def test_the_vectors_hold_in_a_program_that_knows_numpy_and_nothing_of_tpsample(
    file: Path, count: int
) -> None:
    checker = Path(CHECKERS[file].__file__)
    names = ("__future__.annotations", "json", "sys", "pathlib.Path", "typing.Any", "numpy")
    assert imported_modules(checker) - {"math"} == set(names)
    command = [sys.executable, "-I", str(checker), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"{count} test vectors hold\n", done.stderr


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_vectors_are_what_the_package_computes(file: Path) -> None:
    assert file.read_text() == as_text(file)


@pytest.mark.parametrize(
    ("file", "kind", "field"),
    [
        *((NOISE, "philox", "words"), (NOISE, "rows", "stream"), (NOISE, "rows", "words")),
        *((NOISE, "rows", "noise"), (NOISE, "noise", "noise"), (NOISE, "packed", "word")),
        *((NOISE, "tokens", "token"), (MASSES, "rows", "masses"), (MASSES, "rows", "moments")),
        *((MASSES, "floors", "floor"), (MASSES, "ends", "limit")),
    ],
)
def test_a_wrong_vector_is_noticed(file: Path, kind: str, field: str) -> None:
    changed = json.loads(file.read_text())
    row = changed[kind][1]
    numbers = row[field] if isinstance(row[field], list) else [row[field]]
    if field in ("masses", "moments", "limit", "word", "token"):
        numbers[-1] = type(numbers[-1])(int(numbers[-1]) + 1)
    else:
        numbers[-1] = f"{int(numbers[-1], 16) ^ 0x400:08x}"
    row[field] = numbers if isinstance(row[field], list) else numbers[0]
    with pytest.raises(AssertionError):
        CHECKERS[file].check(changed)


def test_the_page_of_noise_names_the_constants_of_the_code() -> None:
    page = NOISE.with_name("NOISE.md").read_text()
    assert noise.LAYOUT in page
    for number in noise.POLYNOMIAL:
        assert repr(number) in page
    domains = (acceptance.DOMAIN_ACCEPT, acceptance.DOMAIN_RECOVERY, acceptance.DOMAIN_DRAFT)
    for word in (noise.DOMAIN_TOKEN, *noise.ELEMENT_KEY, *domains):
        assert f"0x{word:08X}" in page


def test_the_page_of_masses_names_the_constants_of_the_code() -> None:
    page = MASSES.with_name("MASSES.md").read_text()
    for number in masses.POLYNOMIAL:
        assert repr(number) in page
    for number in (masses.LN2_LOW, masses.ROUNDER, masses.NEAR, masses.FLOOR):
        assert f"{number:g}" in page or repr(number) in page or str(int(number)) in page
    for number in (masses.LN2_HIGH, masses.LOG2_E):
        assert f"{number:.23f}".rstrip("0") in page
