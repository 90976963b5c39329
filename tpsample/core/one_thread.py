"""One thread at a time: objects with buffers of their own cannot serve two."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager


class OneThread(AbstractContextManager[None]):
    """Lets one thread into an object at a time. That thread may enter again.

    Args:
        name: of the object, as an error names it.
        way_out: what a second thread can do.

    Raises:
        RuntimeError: on entering, while another thread is inside.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self._name, self._way_out = name, way_out
        self._lock = threading.RLock()

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
