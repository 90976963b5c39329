"""One thread at a time: objects with buffers of their own cannot serve two."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType


class OneThread(AbstractContextManager[None]):
    """Lets one thread into an object at a time. That thread may enter again.

    Args:
        name: of the object, as an error names it.
        way_out: what a second thread can do.

    Attributes:
        body: the frame of a call that holds the object, until it has ended.

    Raises:
        RuntimeError: on entering, while another thread is inside.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self._name, self._way_out = name, way_out
        self._lock = threading.RLock()
        self.body: FrameType | None = None

    def changing(self) -> OneThread:
        """Return itself, to be entered for a change or by a call, which stand in no other call.

        Raises:
            RuntimeError: this thread is in the middle of a call that holds the object.
        """
        if self.body is None or not _is_running(self.body):
            return self
        raise RuntimeError(
            f"{self._name}: this call came in the middle of another one of this thread, as in "
            "the handler of a signal; make it after that one has returned"
        )

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise RuntimeError(
                f"{self._name}: a call is running in another thread; {self._way_out}"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OneThread], tuple[str, str]]:
        """A copy is another object's."""
        return OneThread, (self._name, self._way_out)


class OneCall(AbstractContextManager[None]):
    """Lets one call into an object at a time, and none out of the middle of another.

    A thread gets into the middle of its own call by a signal's handler, or by the
    ``__torch_function__`` of a tensor. A call that an exception has ended is not in the way,
    wherever that arrived.

    Args:
        name, way_out: as of `OneThread`.
        check: raises where no call may begin.

    Raises:
        RuntimeError: on entering, in the middle of a call, or while another thread is inside.
    """

    def __init__(self, name: str, way_out: str, check: Callable[[], None]) -> None:
        self._name, self._thread, self._check = name, OneThread(name, way_out), check
        self.body: FrameType | None = None  # of the call inside, until that has left

    def __enter__(self) -> None:
        self.enter(sys._getframe(1))

    def enter(self, body: FrameType) -> None:
        """Begin a call, whose body is a frame of this thread. `__exit__` ends it."""
        self._check()
        self._thread.__enter__()
        if self.body is not None and _is_running(self.body):
            self._thread.__exit__()
            raise RuntimeError(
                f"{self._name}: this call began in the middle of another one of this thread, as "
                "in the handler of a signal; make it after that one has returned"
            )
        self.body = body

    def __exit__(self, *_: object) -> None:
        self.body = None
        self._thread.__exit__()


def _is_running(body: FrameType) -> bool:
    """Return whether a frame is still on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not body:
        frame = frame.f_back
    return frame is not None
