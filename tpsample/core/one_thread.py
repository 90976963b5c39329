"""One thread at a time: objects with buffers of their own cannot serve two."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

from tpsample.core.caller_warning import CALLS, warn_after


class OneThread(AbstractContextManager[None]):
    """Lets one thread into an object at a time. That thread may enter again.

    Args:
        name: of the object, as an error names it.
        way_out: what a second thread can do.

    Attributes:
        lock: the lock, which the thread inside holds.
        body: the frame of a call that holds the object, until it has ended.

    Raises:
        RuntimeError: on entering, while another thread is inside.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self._name, self._way_out = name, way_out
        self.lock = threading.RLock()
        self.body: FrameType | None = None

    def changing(self) -> OneThread:
        """Return `self`, to be entered by a change or a call that is inside no other call.

        Raises:
            RuntimeError: this thread is in the middle of a call that holds the object.
        """
        if self.body is None or not _is_running(self.body):
            return self
        raise RuntimeError(
            f"{self._name}: this call came in the middle of another one of this thread, as in "
            "the handler of a signal; make it after that one has returned"
        )

    def busy(self) -> RuntimeError:
        """Return the error of a thread that comes while another one is inside."""
        return RuntimeError(f"{self._name}: a call is running in another thread; {self._way_out}")

    def __enter__(self) -> None:
        if not self.lock.acquire(False):
            raise self.busy()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def __reduce__(self) -> tuple[type[OneThread], tuple[str, str]]:
        """A copy is another object's."""
        return OneThread, (self._name, self._way_out)


class OneCall(AbstractContextManager[None]):
    """Lets one call into an object at a time, and none out of the middle of another.

    A thread gets into the middle of its own call by a signal's handler, or by the
    ``__torch_function__`` of a tensor. A call that was ended by an exception does not block later
    calls, wherever the exception arrived. Warnings of its body wait until the call is closed.

    Args:
        name, way_out: as of `OneThread`.
        check: raises where no call may begin.

    Attributes:
        lock: the lock, which the thread inside holds.
        busy: returns the error for another thread.
        body, held: as in `Closing`.

    Raises:
        RuntimeError: on entering, in the middle of a call, or while another thread is inside.
    """

    def __init__(self, name: str, way_out: str, check: Callable[[], None]) -> None:
        self._name, self._check, thread = name, check, OneThread(name, way_out)
        self.lock, self.busy = thread.lock, thread.busy
        self.body: FrameType | None = None  # of the call inside, until that has left
        self.held: tuple[str, ...] = ()
        CALLS[id(self)] = self

    def __enter__(self) -> None:
        if not self.enter(sys._getframe(1)):
            raise self.busy()

    def enter(self, body: FrameType) -> bool:
        """Begin a call, whose body is a frame of this thread, unless another thread is inside.

        Returns:
            Whether the call has begun; `__exit__` ends it.
        """
        self._check()
        if not self.lock.acquire(False):
            return False
        if self.body is not None and _is_running(self.body):
            self.lock.release()
            raise RuntimeError(
                f"{self._name}: this call began in the middle of another one of this thread, as "
                "in the handler of a signal; make it after that one has returned"
            )
        self.body = body
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        held, self.held, self.body = self.held, (), None
        self.lock.release()
        if held:
            warn_after(held, error)


def _is_running(body: FrameType) -> bool:
    """Return whether a frame is still on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not body:
        frame = frame.f_back
    return frame is not None
