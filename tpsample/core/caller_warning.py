"""Warnings at the line of the caller, however many functions of this package are in between.

A filter may turn a warning into an error. In the middle of a collective call that would leave the
peers waiting, so a warning is held until the call is closed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Protocol
from weakref import WeakValueDictionary

_BETWEEN = (str(Path(__file__).parents[1]), contextlib.__file__)


class Closing(Protocol):
    """A call that gives its warnings once it is closed.

    Attributes:
        body: the frame of the call while it is open, or None.
        held: the warnings so far.
    """

    body: FrameType | None
    held: tuple[str, ...]


CALLS: WeakValueDictionary[int, Closing] = WeakValueDictionary()
"""All calls of this process by `id`, open or not."""


def warn(text: str) -> None:
    """Warn at the line that has called this package, once the call that is open there is closed."""
    # A list of references is made at once, while another thread may add a call.
    calls = [reference() for reference in CALLS.valuerefs()]
    opened = {call.body: call for call in calls if call is not None}
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        if frame in opened:
            opened[frame].held += (text,)
            return
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)


def warn_after(texts: Iterable[str], error: BaseException | None) -> None:
    """Give the warnings of a closed call. An error that ended it comes before one of a filter."""
    try:
        for text in texts:
            warn(text)
    except Warning:
        if error is None:
            raise
