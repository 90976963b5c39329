"""The times of steps that workers of vLLM wrote down; see `timed_workers`."""

from __future__ import annotations

import statistics
from pathlib import Path


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"steps-{rank}"


class Steps:
    """The steps of a server, read as they come.

    Args:
        folder: of the server.
        ranks: how many it has.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files, self._read = [file_of(folder, rank) for rank in range(ranks)], [0] * ranks

    def new(self, rows: int) -> float:
        """Return how many ms LM head and sampler took in the steps of so many rows since the last
        call: the median of the slowest rank.

        Raises:
            RuntimeError: there was no such step.
        """
        found = []
        for rank, path in enumerate(self._files):
            lines = path.read_text().splitlines()[self._read[rank] :]
            self._read[rank] += len(lines)
            pairs = (line.split() for line in lines)
            seconds = [float(second) for first, second in pairs if int(first) == rows]
            if not seconds:
                raise RuntimeError(f"{path.name}: no step of {rows} rows among {len(lines)}")
            found.append(1e3 * statistics.median(seconds))
        return max(found)
