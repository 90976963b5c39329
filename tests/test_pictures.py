"""The pictures of the README are well formed, and their numbers follow from the sizes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.lab import text
from tests.support.commands import ROOT

PICTURES = ROOT / "benchmarks" / "pictures"
ROWS, VOCAB_SIZE, WORLD_SIZE = 256, 128256, 8
FILTERED_ROW = 1960
"""Most bytes that a rank hands to its peers for a row with top_p, which another test bounds."""


@pytest.mark.parametrize("name", ["step.svg", "bytes.svg"])
def test_pictures_are_well_formed(name: str) -> None:
    ElementTree.fromstring((PICTURES / name).read_text())


def test_bytes_are_those_of_the_first_table() -> None:
    logits = ROWS * VOCAB_SIZE * 4 * (WORLD_SIZE - 1) / WORLD_SIZE
    words = ROWS * 8 * (WORLD_SIZE - 1)
    filtered = ROWS * FILTERED_ROW
    moved = [text.size(logits / part) for part in (1, 2, WORLD_SIZE, 2 * WORLD_SIZE)]
    sizes = [*moved, text.size(filtered), text.size(words)]
    assert sizes[0] == "115 MB" and sizes[-1] == "14.3 KB"
    picture, readme = (PICTURES / "bytes.svg").read_text(), (ROOT / "README.md").read_text()
    for size in sizes:
        assert f">{size}<" in picture and size in readme, size
