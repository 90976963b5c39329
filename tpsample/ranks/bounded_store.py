"""A store whose calls end: those of torch have no timeout, so a rank that is cut off would hang."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

EXIT_S = 2.0
"""How long the end of a process waits for a call that was given up."""

_stores: weakref.WeakSet[BoundedStore] = weakref.WeakSet()


class BoundedStore:
    """Calls a store from a thread, and gives the call up if the store does not answer in time.

    The thread still holds the store's lock, so later calls fail at once, unless they have a longer
    limit. A call that failed returns the answer of an empty store.

    Args:
        limit_s: how long a call may take.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self.store, self._limit_s = store, limit_s
        self._asking: threading.Thread | None = None
        _stores.add(self)

    def wait_for_late_call(self, limit_s: float) -> None:
        """Wait for a call that was given up."""
        if self._asking is not None:
            self._asking.join(limit_s)

    def has(self, *keys: str) -> bool:
        """Whether the store has all of these keys."""
        return bool(self._ask(lambda: self.store.check(list(keys))))

    def texts(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of keys, None for one that is not there."""

        def read() -> list[str | None]:
            return [
                self.store.get(key).decode() if self.store.check([key]) else None for key in keys
            ]

        return self._ask(read) or [None] * len(keys)

    def set(
        self, key: str, value: str, limit_s: float | None = None, beside: Sequence[str] = ()
    ) -> bool:
        """Write a value; return whether the store has it, and other keys."""

        def write() -> bool:
            self.store.set(key, value)  # it waits for no answer
            return self.store.check([key, *beside])

        return bool(self._ask(write, limit_s))

    def first(self, key: str, value: str) -> str | None:
        """Write a value unless the key has one; return what it has, None if nobody answers."""
        return self._ask(lambda: self.store.compare_set(key, "", value).decode())

    def _ask(self, call: Callable[[], T], limit_s: float | None = None) -> T | None:
        deadline = time.monotonic() + (limit_s or self._limit_s)
        if self._asking is not None:
            self._asking.join(limit_s or 0.02)
            if self._asking.is_alive():
                return None
        answer: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answer.append(call())

        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        self._asking.join(max(0.0, deadline - time.monotonic()))
        return answer[0] if answer else None

    def __str__(self) -> str:
        store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        host = getattr(store, "host", "")  # a TCPStore is on a host
        return "the store of the process group" + (f" on {host}" if host else "")


@atexit.register
def _wait_for_late_calls() -> None:
    """Let the threads end before Python does: one that comes back later aborts the process."""
    for store in list(_stores):
        store.wait_for_late_call(EXIT_S)
