"""Warnings at the line of the caller, however many functions of this package are in between."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

_BETWEEN = (str(Path(__file__).parents[1]), contextlib.__file__)


def warn(text: str) -> None:
    """Warn at the line that has called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)
