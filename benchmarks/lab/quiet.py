"""Whether the machine had anything else to do while it was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.lab import machine

BUSY_LOAD = 0.3
"""Share of the cores from which on a machine was at work before anything was measured."""
BUSY_AFTER = 1.25
"""Load per core from which on more ran in a session than the ranks, which never ask for more
threads than there are cores."""
BUSY_GPU = 5
"""Percent of use from which on a GPU was at work before a session began."""
WATCHED_S = 0.5
"""For how long the cores are watched."""

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
        "busy_cores": round(busy_cores(), 2),
        "gpu_percent": gpus,
    }


def busy_cores() -> float:
    """Return how many cores are at work now.

    The load average would still count what ended a minute ago, such as an earlier part of the same
    measurement. It is returned where the system tells nothing else.
    """
    try:
        before = _idle_seconds()
        started = time.monotonic()
        time.sleep(WATCHED_S)
        idle, passed = _idle_seconds() - before, time.monotonic() - started
    except OSError:
        return os.getloadavg()[0]
    return max(0.0, (os.cpu_count() or 1) - idle / passed)


def _idle_seconds() -> float:
    """Return for how long the cores had nothing to do, or waited for a disk, in all."""
    idle, waiting = Path("/proc/stat").read_text().splitlines()[0].split()[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


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
    if busy > BUSY_LOAD * cores:
        found.append(f"{busy} of {cores} cores were busy when {name} began")
    if after and after["load"][0] > BUSY_AFTER * max(cores, ranks):
        load = after["load"][0]
        found.append(f"the load average was {load} when {name} ended, more than its own ranks make")
    if any(each > BUSY_GPU for each in before["gpu_percent"]):
        percent = ", ".join(f"{each} %" for each in before["gpu_percent"])
        found.append(f"GPUs were in use when {name} began: {percent}")
    return found


def shown(load: Load | None) -> str:
    """Return a load for a table."""
    if load is None:
        return ""
    gpus = "".join(f", GPU {percent} %" for percent in load["gpu_percent"])
    return ", ".join(f"{each:g}" for each in load["load"]) + gpus
