"""Whether the machine was quiet in every session of a scaling record."""

from __future__ import annotations

from benchmarks import quiet
from benchmarks.scaling.record import Record


def disturbances(record: Record) -> list[str]:
    """Return why the times of a record are not those of a quiet machine; [] if it was quiet."""
    found = []
    for number, session in enumerate(record.sessions, 1):
        found += quiet.disturbances(
            session["before"],
            session.get("after"),
            cores=record.machine["cpu_cores"],
            ranks=max(record.settings.world_sizes),
            name=f"session {number}" if len(record.sessions) > 1 else "the run",
        )
    return found
