"""The README's Python runs as pasted, block after block."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_run_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    torch.manual_seed(0)
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["token_ids"].shape == (2,)
    assert ((names["token_ids"] >= 0) & (names["token_ids"] < 1000)).all()
    assert names["out"].token_ids.shape == (1, 4)


@pytest.mark.parametrize("readme", ["README.md", "tpsample/README.md"])
def test_the_files_it_names_are_there(readme):
    root = README.parent
    named = re.findall(r"`([a-z_0-9/]+\.(?:py|sh|toml))`", (root / readme).read_text())
    assert len(named) > 15
    roots = (root, root / "tpsample")
    assert [name for name in named if not any((base / name).exists() for base in roots)] == []
