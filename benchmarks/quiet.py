"""Whether the machine had anything else to do while it was measured."""

from __future__ import annotations

import os
from typing import Any

from benchmarks import machine

BUSY_AFTER = 1.25
"""Load per core from which on more ran in a session than the ranks, which never ask for more
threads than there are cores."""
BUSY_GPU = 5
"""Percent of use from which on a GPU was at work before a session began."""

Load = dict[str, Any]


def load() -> Load:
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


def disturbances(
    before: Load, after: Load | None, *, cores: int, ranks: int, name: str = "the run"
) -> list[str]:
    """Return why times taken between two loads are not those of a quiet machine; [] if they are.

    Args:
        after: None if the run was killed.
        ranks: processes that measured at the same time.
        name: of what was measured between them.
    """
    found = []
    # The load average counts what has just ended, and the busy cores a rank that has just begun.
    busy = min(before["load"][0], before["busy_cores"])
    if busy > machine.BUSY_LOAD * cores:
        found.append(f"{busy} of {cores} cores were busy when {name} began")
    if after and after["load"][0] > BUSY_AFTER * max(cores, ranks):
        load = after["load"][0]
        found.append(f"the load average was {load} when {name} ended, more than its own ranks make")
    if any(each > BUSY_GPU for each in before["gpu_percent"]):
        percent = ", ".join(f"{each} %" for each in before["gpu_percent"])
        found.append(f"GPUs were in use when {name} began: {percent}")
    return found


def warning(found: list[str]) -> list[str]:
    """Return the line that a page begins with if the machine was not quiet."""
    if not found:
        return []
    return [f"**The machine was not quiet, so take no time from here: {'; '.join(found)}.**"]


def shown(load: Load | None) -> str:
    """Return a load for a table."""
    if load is None:
        return ""
    gpus = "".join(f", GPU {percent} %" for percent in load["gpu_percent"])
    return ", ".join(f"{each:g}" for each in load["load"]) + gpus
