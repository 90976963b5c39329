"""Exceptions that arrive in the middle of a step, as those of a signal's handler do."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
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
    ran, own = 0, threading.get_ident()

    def count() -> None:
        nonlocal ran
        if threading.get_ident() == own:
            ran += 1
            if ran == instruction:
                raise Interrupt

    before_each_instruction(count, call, within)
    return ran


def before_each_instruction(
    each: Callable[[], object], call: Callable[[], object], within: str
) -> None:
    """Make a call, and another before each instruction of a file or folder."""
    (_monitored if sys.version_info >= (3, 12) else _traced)(each, call, within)


def _monitored(each: Callable[[], object], call: Callable[[], object], within: str) -> None:
    """Do so from Python 3.12 on."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tool, instruction = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION

    def ran(code: CodeType, _: int) -> Any:
        return each() if code.co_filename.startswith(within) else monitoring.DISABLE

    monitoring.use_tool_id(tool, __name__)
    monitoring.restart_events()
    monitoring.register_callback(tool, instruction, ran)
    monitoring.set_events(tool, instruction)
    try:
        call()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def _traced(each: Callable[[], object], call: Callable[[], object], within: str) -> None:
    """Do the same before Python 3.12, which has no `sys.monitoring`."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            each()
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


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
