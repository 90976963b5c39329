"""How the native kernels are compiled: once per machine, kept for every later process.

Numba's own cache does not see that a function which a kernel calls has changed. A file of that
cache that is not whole makes every step fail. So `kernel_cache.py` takes its place.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import numba
import numpy as np

from tpsample.backends.numba_.kernels.inner import InnerCompiler
from tpsample.backends.numba_.kernels.kernel_cache import KernelCache
from tpsample.backends.numba_.kernels.threads import share

log = logging.getLogger(__name__)

F32, F64, I8, I32, I64 = np.float32, np.float64, np.int8, np.int32, np.int64
U16, U32, U64 = np.uint16, np.uint32, np.uint64

SUMS = {"reassoc", "contract", "nsz"}
"""Any order of summation: only where a bound covers every order."""

FUSED = {"contract"}
"""A multiplication and an addition may be rounded once: only where a bound covers both."""

INNER = {"pipeline_class": InnerCompiler, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
"""Options of what only kernels call."""


def jit(
    *,
    fastmath: set[str] | bool = False,
    entry: bool = False,
    in_parts: bool = False,
    allocates: bool = False,
    inline: bool = False,
) -> Callable[..., Any]:
    """Return the decorator of a native kernel. It runs without the interpreter's lock.

    Args:
        fastmath: SUMS or FUSED; by default every operation is rounded as it is written.
        entry: whether Python calls it, and no kernel does; other functions only kernels call.
        in_parts: whether Python calls an entry of this name, which calls the kernel for each part
            of a range; see `tpsample.backends.numba_.kernels.threads`.
        allocates: whether it makes or returns arrays, or calls NumPy, as an entry may, too. Only
            then does it count references to arrays: atomic additions, which took 7 % of a step of
            64 rows.
        inline: whether it becomes a part of its callers.
    """
    options: dict[str, Any] = {"no_cfunc_wrapper": True, "no_cpython_wrapper": not entry}
    options["_nrt"] = entry or allocates
    options["inline"] = "always" if inline else "never"
    if not entry:
        options["pipeline_class"] = InnerCompiler

    def decorate(function: Callable[..., Any]) -> Any:
        if in_parts:
            kernel_of_part = jit(fastmath=fastmath, allocates=allocates)(function)

            def share_parts(start, stop, parts, threads, arguments):
                share(kernel_of_part, start, stop, parts, threads, arguments)

            update_wrapper(share_parts, function)
            del share_parts.__wrapped__  # whose arguments Numba would take
            code, place = share_parts.__code__, function.__code__
            share_parts.__code__ = code.replace(
                co_filename=place.co_filename, co_firstlineno=place.co_firstlineno
            )
            return jit(entry=True)(share_parts)
        kernel = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy", **options)(function)
        if entry:
            kernel._cache, compile_kernel = KernelCache(function), kernel.compile

            def compile_alone(types: tuple) -> Any:
                if not is_ready(kernel, types):
                    tell_once(function.__name__)
                with kernel._cache.alone(types), uncollected():
                    return compile_kernel(types)

            kernel.compile = compile_alone
        return kernel

    return decorate


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop Python's search for garbage while a kernel compiles.

    The compiler keeps most of what it makes, so the searches find little, and they took a second of
    a first step.
    """
    looks = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if looks:
            gc.enable()


def is_ready(kernel: Any, types: tuple) -> bool:
    """Return whether a kernel is compiled for argument types, or needs to be loaded alone."""
    return types in kernel.overloads or kernel._cache.has(types)


announced: list[str] = []
"""Has one entry once this process has told its user that it compiles kernels: which ones."""


def tell_once(kernel: str) -> None:
    """Say, once in a process, that kernels are compiled, and that the next process has them."""
    if not announced:
        announced.append(kernel)
        log.warning(
            "compiling %s, and other kernels of this CPU as steps need them, some seconds each, "
            "once per machine; warm_up() does so ahead",
            kernel,
        )
