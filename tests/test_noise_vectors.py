"""The test vectors of NOISE.md hold in numpy alone, and they are what the package computes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import noise_checker, noise_vectors
from tests.support.modules import imported_modules
from tpsample import noise
from tpsample.core import acceptance

VECTORS = json.loads(noise_vectors.FILE.read_text())
CHECKER = Path(noise_checker.__file__)


def test_they_hold_in_a_program_that_knows_numpy_and_nothing_of_tpsample() -> None:
    imported = imported_modules(CHECKER)
    assert imported == {
        "__future__.annotations",
        "json",
        "math",
        "sys",
        "pathlib.Path",
        "typing.Any",
        "numpy",
    }
    command = [sys.executable, "-I", str(CHECKER), str(noise_vectors.FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "27 test vectors hold\n", done.stderr


def test_they_are_what_the_package_computes() -> None:
    assert noise_vectors.FILE.read_text() == noise_vectors.as_text()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("philox", "words"), ("rows", "stream"), ("rows", "words"), ("rows", "noise")),
        *(("noise", "noise"), ("packed", "word"), ("tokens", "token")),
    ],
)
def test_a_wrong_vector_is_noticed(kind: str, field: str) -> None:
    changed = copy.deepcopy(VECTORS)
    row = changed[kind][1]
    value = row[field]
    if isinstance(value, list):
        value[-1] = f"{int(value[-1], 16) ^ 0x400:08x}"
    elif field == "noise":
        row[field] = f"{int(value, 16) ^ 0x400:08x}"
    else:
        row[field] = type(value)(int(value) + 1)
    with pytest.raises(AssertionError):
        noise_checker.check(changed)


def test_the_page_names_the_constants_of_the_code() -> None:
    page = (noise_vectors.FILE.parent / "NOISE.md").read_text()
    assert noise.LAYOUT in page
    for number in noise.POLYNOMIAL:
        assert repr(number) in page
    domains = (acceptance.DOMAIN_ACCEPT, acceptance.DOMAIN_RECOVERY, acceptance.DOMAIN_DRAFT)
    for word in (noise.DOMAIN_TOKEN, *noise.ELEMENT_KEY, *domains):
        assert f"0x{word:08X}" in page
