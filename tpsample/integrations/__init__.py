"""Adapters for engines, and the versions that they were tried with. See README.md.

Nothing is imported here, because each adapter needs its engine.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import warnings

TRIED = {"transformers": ("5.23", "5.24"), "vllm": ("0.32", "0.33"), "sglang": ("0.5.23",)}
"""Beginnings of versions, the newest last. The seams that an adapter uses are not stable."""
SELF_TESTED = ("vllm", "sglang")
"""Engines whose adapter compares a step with the definition before it serves."""
_OLDEST_PYTHON = (3, 11)
"""Of all of them."""


def check_version(engine: str, installed: str) -> None:
    """Raise an ImportError for a version of an engine that was not tried, with the way out.

    A later one of an engine with a self-test is warned of, and that test decides.

    Args:
        engine: a name of `TRIED`.
        installed: the version that is installed, such as "0.32.1+cpu".
    """
    *_, newest = tried = TRIED[engine]
    if f"{installed.partition('+')[0]}.".startswith(tuple(f"{each}." for each in tried)):
        return
    if engine in SELF_TESTED and _numbers(installed) > _numbers(newest):
        warnings.warn(
            f"tpsample.integrations.{engine}: {engine} {newest} was tried, {installed} is installed"
            "; it serves if its first step passes the self-test",
            stacklevel=2,
        )
        return
    way_out = f"pip install '{engine}=={newest}.*'"
    if sys.version_info < _OLDEST_PYTHON:
        way_out = f"{newest} needs Python {'.'.join(map(str, _OLDEST_PYTHON))} or later"
    raise ImportError(
        f"tpsample.integrations.{engine}: {engine} {' or '.join(tried)} is supported, "
        f"{installed} is installed; {way_out}"
    )


def _numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with."""
    parts = version.partition("+")[0].split(".")
    return [int(part) for part in itertools.takewhile(str.isdigit, parts)]


def __getattr__(name: str) -> object:
    """Import an adapter when it is first asked for."""
    if name in TRIED:
        return importlib.import_module(f"tpsample.integrations.{name}")
    raise AttributeError(f"module 'tpsample.integrations' has no attribute {name!r}")
