"""Tiles that were measured, in `measured_tiles.json`: what `benchmarks.questions.tune` writes.

The file that is shipped is empty: nothing has been measured yet.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpsample.local.tiles import Gpu, Tile

FILE = Path(__file__).with_name("measured_tiles.json")
Shape = tuple[Gpu, int, int, int]
"""GPU, rows of the vocabulary, hidden size, rows of the batch tile; 16-bit weights."""


@dataclass(frozen=True)
class MeasuredTile:
    """The fastest tile of one shape, and the reason: its time and that of the rule's tile."""

    gpu: Gpu
    vocab_rows: int
    hidden_size: int
    batch: int
    tile: Tile
    us: float
    rule_us: float

    @staticmethod
    def of(entry: dict[str, Any]) -> "MeasuredTile":
        """Return the entry that `dataclasses.asdict` has made a dictionary."""
        fields = {**entry, "gpu": Gpu(**entry["gpu"]), "tile": Tile(**entry["tile"])}
        return MeasuredTile(**fields)

    @property
    def shape(self) -> Shape:
        return self.gpu, self.vocab_rows, self.hidden_size, self.batch


def load(path: Path) -> list[MeasuredTile]:
    """The entries of a file.

    Raises:
        ValueError: naming the file and the first entry that is not one.
    """
    found = []
    for number, entry in enumerate(json.loads(path.read_text())):
        try:
            found.append(MeasuredTile.of(entry))
        except (KeyError, TypeError) as wrong:
            raise ValueError(f"{path}: entry {number} is no measured tile: {wrong}") from wrong
    return found


def save(path: Path, entries: Sequence[MeasuredTile]) -> None:
    """Write entries, one a line, in an order that does not depend on when they were measured."""
    ordered = sorted(entries, key=lambda entry: (entry.gpu.name, *entry.shape[1:]))
    lines = [json.dumps(asdict(entry)) for entry in ordered]
    path.write_text("[" + ",".join(f"\n{line}" for line in lines) + "\n" * bool(lines) + "]\n")


@cache
def measured_tiles() -> dict[Shape, Tile]:
    """The shipped file as a table; read once in a process."""
    return {entry.shape: entry.tile for entry in load(FILE)}
