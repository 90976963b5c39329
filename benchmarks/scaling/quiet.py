"""Whether the machine had anything else to do while it was measured."""

from __future__ import annotations

import os
from typing import Any

from benchmarks import machine
from benchmarks.scaling.record import Record

BUSY_AFTER = 1.25
"""Load per core from which on more ran in a session than the ranks, which never ask for more
threads than there are cores."""
BUSY_GPU = 5
"""Percent of use from which on a GPU was at work before a session began."""


def load() -> dict[str, Any]:
    """Return the load averages over 1, 5 and 15 minutes, and what is at work now.

    That is the number of busy cores and the percent of use of every GPU.
    """
    used = machine.printed(
        "nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"
    )
    gpus = [int(line) for line in (used or "").split() if line.isdigit()]
    return {
        "load": [round(each, 2) for each in os.getloadavg()],
        "busy_cores": round(machine.busy_cores(), 2),
        "gpu_percent": gpus,
    }


def disturbances(record: Record) -> list[str]:
    """Return why the times of a record are not those of a quiet machine; [] if it was quiet."""
    cores, sessions, found = record.machine["cpu_cores"], record.sessions, []
    for number, session in enumerate(sessions, 1):
        before, after = session["before"], session.get("after")
        name = f"session {number}" if len(sessions) > 1 else "the run"
        if before["busy_cores"] > machine.BUSY_LOAD * cores:
            found.append(f"{before['busy_cores']} of {cores} cores were busy when {name} began")
        if after and after["load"][0] > BUSY_AFTER * max(cores, *record.settings.world_sizes):
            found.append(
                f"the load average was {after['load'][0]} when {name} ended, more than its own "
                "ranks make"
            )
        if any(each > BUSY_GPU for each in before["gpu_percent"]):
            percent = ", ".join(f"{each} %" for each in before["gpu_percent"])
            found.append(f"GPUs were in use when {name} began: {percent}")
    return found
