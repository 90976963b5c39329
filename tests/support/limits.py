"""Time limits end hangs; they do not measure, so a machine that is slow or busy gets longer ones.

Every limit of the suite is a number of seconds on two quiet cores times `slowness()`.
"""

from __future__ import annotations

import os
import time

_VARIABLE = "TPSAMPLE_TEST_SLOWNESS"
_QUIET_S = 1.5
"""Importing torch on two quiet cores."""
_MOST = 20.0
"""The first import reads from a cold disk; a hang must still end."""


def slowness() -> float:
    """How many times as long as on two quiet cores things take here; at least 1.

    Measured by the first process of a session (see tests/conftest.py), inherited by all others.
    """
    return float(os.environ.get(_VARIABLE, "1"))


def measure_slowness() -> None:
    """Import torch and keep how long it took, unless this session has measured already."""
    began = time.perf_counter()
    import torch  # noqa: F401 - the workload, which every process of the suite needs anyway

    took = time.perf_counter() - began
    os.environ.setdefault(_VARIABLE, f"{min(_MOST, max(1.0, took / _QUIET_S)):.2f}")
