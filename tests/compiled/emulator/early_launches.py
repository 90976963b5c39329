"""Launches that may overlap (programmatic dependent launch), and what they may not touch."""

from __future__ import annotations

from collections import Counter

from tests.compiled.emulator.regions import EARLY_READ, EARLY_WRITE, READ, WRITE, GlobalMemory


class EarlyLaunches:
    """Compares each launch with those before it that may still run when it begins."""

    def __init__(self) -> None:
        self._running: list[tuple[str, GlobalMemory]] = []

    def compare(
        self, name: str, memory: GlobalMemory, early: bool, chained: bool, doubts: Counter[str]
    ) -> None:
        """Until it has waited, a launch must not touch what others write, nor write what they read.

        Args:
            early: whether it may begin before the launch before it has ended.
            chained: whether a launch behind it may begin although those before it still run.
        """
        for other, before in self._running if early else ():
            at = {region.start: region for region in before.regions}
            for region in memory.regions:
                theirs = at.get(region.start)
                if theirs is None or theirs.size != region.size:
                    continue
                own = region.marks
                reads = ((own & (EARLY_READ | EARLY_WRITE)) > 0) & ((theirs.marks & WRITE) > 0)
                writes = ((own & EARLY_WRITE) > 0) & ((theirs.marks & (READ | WRITE)) > 0)
                if reads.any() or writes.any():
                    text = f"overlap: {name} touches {region.name} before it waits for {other}"
                    doubts[text] += 1
        if not (early and chained):
            self._running.clear()
        self._running.append((name, memory))
