"""How the native kernels are compiled: once per machine, kept for every later process.

The compiled code lies in a folder of the user's cache, whose name has a digest of the sources,
because Numba's own cache does not see that a function which a kernel calls has changed. Code that
checks bounds (NUMBA_BOUNDSCHECK) has a folder of its own. Where no folder can be written, each
process compiles.

Two processes that compile at once could overwrite each other's entry of Numba's index. Therefore
a kernel is compiled, or loaded, under the lock of the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np

F32, F64, I16, I32, I64 = np.float32, np.float64, np.int16, np.int32, np.int64
U16, U32, U64 = np.uint16, np.uint32, np.uint64

SUMS = {"reassoc", "contract", "nsz"}
"""Any order of summation: only where a bound covers every order."""

FUSED = {"contract"}
"""A multiplication and an addition may be rounded once: only where a bound covers both."""

_PACKAGE = Path(__file__).parent.parent
_SOURCES = ("native/*.py", "core/*.py", "screening/*.py", "noise.py", "request/params.py")
"""The kernels, and the files whose constants they take."""


def _folder() -> Path | None:
    """Return the folder of the compiled code, or None if it cannot be written."""
    checks = bool(numba.config.BOUNDSCHECK)
    digest = hashlib.sha256(f"{numba.__version__} {checks=}".encode())
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    root = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root).expanduser() / "tpsample" / f"native-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return None
    return folder if os.access(folder, os.W_OK) else None


FOLDER = _folder()


def jit(
    *,
    fastmath: set[str] | bool = False,
    entry: bool = False,
    allocates: bool = False,
    inline: bool = False,
) -> Callable[..., Any]:
    """Return the decorator of a native kernel. It runs without the interpreter's lock.

    Args:
        fastmath: SUMS or FUSED; by default every operation is rounded as it is written.
        entry: whether Python calls it, and no kernel does; other functions only kernels call.
        allocates: whether it makes or returns arrays, or calls NumPy, as an entry may, too. Only
            then does it count references to arrays: atomic additions, which took 7 % of a step of
            64 rows.
        inline: whether it becomes a part of its callers.
    """
    options: dict[str, Any] = {"no_cfunc_wrapper": True, "no_cpython_wrapper": not entry}
    options["_nrt"] = entry or allocates
    options["inline"] = "always" if inline else "never"

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy", **options)(function)
        if FOLDER is not None and entry:
            before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(FOLDER)
            try:
                kernel.enable_caching()
            finally:
                numba.config.CACHE_DIR = before
            kernel.compile = _lock()(kernel.compile)  # for each combination of argument types
        return kernel

    return decorate


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the folder's lock, which lies between threads as between processes."""
    with open(f"{FOLDER}/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
