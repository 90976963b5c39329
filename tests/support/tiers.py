"""Tests that run by default, in minutes, and tests that `make soak` adds."""

from __future__ import annotations

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Cases of `parametrize` that the default run leaves out; a tuple is one case."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=pytest.mark.long) for each in values]
