"""The pictures of the README are what their script draws, and their numbers what is counted."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.questions import explained
from tests.support.commands import ROOT


@pytest.mark.parametrize("name", explained.PICTURES)
def test_the_committed_pictures_are_those_of_the_script(name: str) -> None:
    drawn = explained.PICTURES[name]()
    ElementTree.fromstring(drawn)
    assert (explained.FOLDER / name).read_text() == drawn


def test_bytes_are_those_of_the_first_table() -> None:
    sizes = {what: explained.text.size(count) for what, count, _ in explained.travels()}
    assert sizes["all-gather of logits, fp32"] == "115 MB"
    assert sizes["tpsample"] == "14.3 KB"  # 7 peers × 256 rows × 8 bytes
    readme = (ROOT / "README.md").read_text()
    for size in sizes.values():
        assert size in readme, f"{size} is on the picture, and not in the README"
