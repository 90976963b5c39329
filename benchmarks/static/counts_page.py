"""The page of a count, and its record, result.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.machine import describe
from benchmarks.lab.text import cell, table


def write_page(folder: Path, sections: Sequence[str], **found: Any) -> None:
    """Write sections, this machine behind them, and a record that holds what was found, too."""
    facts = describe(torch.device("cpu"))
    cells = [(name, cell(value)) for name, value in facts.items() if value is not None]
    machine = table(("name", "value"), cells, right=2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    (folder / "README.md").write_text("\n\n".join([*sections, machine]) + "\n")
