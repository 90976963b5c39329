"""One process at a time compiles a kernel, unless that process is stuck; a fork waits for threads.

A lock saves work and nothing else, because a file of code is replaced whole. Whoever waits for a
lock STUCK_S without a sign of life, or LONGEST_S in all, compiles as well. The lock belongs to a
process, so a child of it has none.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from numba.core.compiler_lock import global_compiler_lock

from tpsample.core.repeated import repeated

STUCK_S, LONGEST_S = 5.0, 120.0
BEAT_S = 0.5

_opened: set[int] = set()
"""The open files of the locks that this process has or waits for."""


@contextmanager
def alone(path: Path, is_done: Callable[[], bool]) -> Iterator[None]:
    """Take a lock for the body, or wait until what its holder does is done, or that is stuck."""
    with _open(path) as file:
        last, heard = None, time.monotonic()
        limit = heard + LONGEST_S
        while not _take(file) and not is_done() and time.monotonic() < limit:
            beat = os.fstat(file).st_mtime_ns
            if beat != last:
                last, heard = beat, time.monotonic()
            elif time.monotonic() > heard + STUCK_S:
                break
            time.sleep(0.02)
        with repeated(lambda: _beat(file), BEAT_S):
            yield


def is_taken(path: Path) -> bool:
    """Return whether another process has a lock."""
    with _open(path) as file:
        return not _take(file)


@contextmanager
def _open(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _opened.add(file)
    try:
        yield file
    finally:
        _opened.discard(file)
        os.close(file)


def _take(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _beat(file: int) -> None:
    with suppress(OSError):
        os.utime(file)


def _begin_as_child() -> None:
    while _opened:
        os.close(_opened.pop())
    global_compiler_lock.release()


# A fork waits until no thread compiles. Otherwise the child would have the locks of Numba and LLVM
# as they are, and no thread that lets go of them.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=_begin_as_child,
)
