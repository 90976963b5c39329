"""The compiled code of native kernels, kept in the user's cache folder for later processes.

    <cache>/tpsample/native-<digest>/<kernel>-<digest>         a digest of all that follows, code
    <cache>/tpsample/native-<digest>/<kernel>-<digest>.lock    locked while a process compiles it

A step never fails because the cache does. Code that cannot be loaded is compiled, code that cannot
be saved stays in memory, and the first such failure of a process is logged.

Code that is loaded is run. Therefore a file is loaded only if nobody but its owner may write it and
its folder, and the owner is this user or root.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps, loads

from tpsample.backends.numba_.kernels import compile_lock
from tpsample.core.checks import text_of

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[3]
_SOURCES = ("backends/numba_/kernels/*.py", "backends/screening/*.py", "core/*.py", "noise.py")
"""The kernels, and the files whose constants they take."""
_SETTINGS = (
    *("CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE"),
    *("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "DISABLE_INTEL_SVML", "EXTEND_VARIABLE_LIFETIMES"),
    *("LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS"),
)
"""The settings of Numba that change code."""


def sources() -> list[Path]:
    """Return the files of this package that decide what the kernels compute."""
    return [path for pattern in _SOURCES for path in sorted(_PACKAGE.glob(pattern))]


@cache
def folder() -> Path:
    """Return the folder of the code of these sources, compiled by this Numba for this CPU.

    Raises:
        RuntimeError: this user has no home.
    """
    root = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    features = binding.get_host_cpu_features().flatten()
    host = binding.get_process_triple(), binding.get_host_cpu_name(), features
    versions = numba.__version__, llvmlite.__version__, np.__version__, sys.version
    settings = [str(getattr(config, name, None)) for name in _SETTINGS]
    of_sources = [_digest(path.read_bytes()) for path in sources()]
    digest = _digest(repr((host, versions, settings, of_sources)).encode()).hex()
    return Path(root).expanduser() / "tpsample" / f"native-{digest[:16]}"


class KernelCache(NullCache):
    """The compiled code of one kernel, a file for each combination of argument types."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loaded: dict[str, bytes] = {}

    def has(self, types: tuple) -> bool:
        """Return whether there is intact code for argument types, which is then kept in memory."""
        with _reported():
            name = self._name(types)
            if name not in self._loaded and (code := _read(name)) is not None:
                self._loaded[name] = code
            return name in self._loaded
        return False

    def is_locked(self, types: tuple) -> bool:
        """Return whether another process compiles for argument types."""
        with _reported():
            return compile_lock.is_taken(self._lock(types))
        return False

    @contextmanager
    def alone(self, types: tuple) -> Iterator[None]:
        """Let the body compile for argument types once no other process does, or load."""
        with ExitStack() as stack:
            if not self.has(types):
                with _reported():
                    lock = self._lock(types)
                    stack.enter_context(compile_lock.alone(lock, lambda: self.has(types)))
            yield

    def load_overload(self, types: tuple, target_context: Any) -> Any:
        if not self.has(types):
            return None
        code = self._loaded.pop(self._name(types))
        with _reported():
            target_context.refresh()
            return CompileResult._rebuild(target_context, *loads(code))
        return None

    def save_overload(self, types: tuple, result: Any) -> None:
        if result.library.has_dynamic_globals:
            return
        with _reported():
            name, code = self._name(types), dumps(result._reduce())
            with _replaced(_made() / name) as file:
                file.write(_digest(name.encode(), code) + code)

    def _name(self, types: tuple) -> str:
        function, code = self._function, self._function.__code__
        kernel = f"{function.__module__}.{function.__name__}"
        signature = f"{kernel} {code.co_firstlineno} {', '.join(map(str, types))}"
        return f"{kernel}-{_digest(_source(code.co_filename), signature.encode()).hex()[:16]}"

    def _lock(self, types: tuple) -> Path:
        return _made() / f"{self._name(types)}.lock"


def _made() -> Path:
    """Return the folder, made if it is not there."""
    directory = folder()
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, exist_ok=True)
    _require_ours(directory, directory.stat())
    return directory


def _read(name: str) -> bytes | None:
    """Return the code in a file, or None if there is no file.

    Raises:
        PermissionError: somebody else may have written it.
        ValueError: it is not whole.
    """
    path = folder() / name
    try:
        _require_ours(path.parent, path.parent.stat())
        with open(path, "rb", opener=_open_file) as file:
            _require_ours(path, os.fstat(file.fileno()))
            digest, code = file.read(_DIGEST_SIZE), file.read()
    except FileNotFoundError:
        return None
    if digest != _digest(name.encode(), code):
        raise ValueError(f"{name} is damaged")
    return code


def _require_ours(path: Path, status: os.stat_result) -> None:
    """Check that nobody can have written a file or a folder but this user or root."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} is owned by user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write {path}")


def _open_file(path: str, flags: int) -> int:
    """Open a file that is no link; a pipe of that name cannot stop us."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextmanager
def _replaced(path: Path) -> Iterator[Any]:
    """Write a file that takes the place of another one when it is whole."""
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(number, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@cache
def _source(path: str) -> bytes:
    """Return a digest of a file of this package, or of a test."""
    return _digest(Path(path).read_bytes())


_DIGEST_SIZE = 32


def _digest(*parts: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


@contextmanager
def _reported() -> Iterator[None]:
    """Go on behind a body that fails, and log the first failure of the process.

    An exception that the handler of a signal raised in the body is the caller's.
    """
    global _failed
    try:
        yield
    except Exception as error:
        if _from_a_signal(error):
            raise
        if not _failed:
            _failed = True
            log.warning(
                "the kernel cache %s failed (%s). What it does not give is compiled, which takes "
                "up to a minute in each process. If this comes again, remove the folder, let its "
                "owner alone write it, or name another one in NUMBA_CACHE_DIR",
                *(_named(), text_of(error)),
            )


def _from_a_signal(error: Exception) -> bool:
    """Return whether the handler of a signal raised an exception, in the middle of what ran."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, an object that is called, or a partial of one."""
    handler = handler.func if isinstance(handler, partial) else handler
    called = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(called, "__code__", None)


def _named() -> str:
    with suppress(Exception):
        return str(folder())
    return "of this user"


_failed = False
