"""Exceptions that arrive in the middle of a step, as those of a signal's handler do."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tpsample

PACKAGE = str(Path(tpsample.__file__).parent)


class Interrupt(KeyboardInterrupt):
    """Raised by these helpers alone."""


def interrupt_at(instruction: int | None, call: Callable[[], object], within: str = PACKAGE) -> int:
    """Make a call in which an exception arrives at an instruction of the package, counted from 1.

    Args:
        within: a file of the package, whose instructions alone are counted. Default: all.

    Returns:
        How many instructions ran.

    Raises:
        Interrupt: that exception, unless the call ended before it.
    """
    ran = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        if event == "opcode":
            ran += 1
            if ran == instruction:
                raise Interrupt
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame has asked for them before it traces.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return ran


@contextmanager
def interrupt_after(seconds: float) -> Iterator[list[bool]]:
    """Let a signal come, whose handler raises `Interrupt`; yields a list that says so when it has.

    No signal comes after the body. Python loses an exception that is raised while it collects
    garbage, in a callback of a weak reference, and other tests leave such garbage. So none is
    collected in the body.
    """
    came: list[bool] = []

    def handle(*_: object) -> None:
        came.append(True)
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    gc.disable()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
