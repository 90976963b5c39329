"""Calls of a kernel that share a range among the threads of PyTorch (`torch.get_num_threads`).

PyTorch's threads are those of OpenMP. After each of its operations they wait for the next one by
spinning, for some milliseconds. Threads of our own would share the processor with them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

THREAD_WORK = 2**21
"""Multiplications that are worth another thread: about 0.1 ms."""

_parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
"""A function of OpenMP: it calls another one in each of a team of threads, and waits for all."""
_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _forget_threads() -> None:
    """OpenMP's threads do not survive a fork, and a call would wait for them."""
    global _parallel
    _parallel = None


os.register_at_fork(after_in_child=_forget_threads)


def threads_for(work: int) -> int:
    """Return among how many threads so many multiplications are worth sharing."""
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


def in_ranges(
    kernel: Callable[..., Any],
    first: int,
    last: int,
    threads: int,
    arguments: Callable[[int, int, int], tuple],
) -> None:
    """Call a kernel once per thread, and wait for all calls.

    Args:
        arguments: of the call for a range, from its first item to its last, and its thread.
    """
    bounds = [first + (last - first) * thread // threads for thread in range(threads + 1)]
    calls = iter([arguments(bounds[t], bounds[t + 1], t) for t in range(threads)])
    errors: list[BaseException] = []

    def take_calls(_: object = None) -> None:
        try:
            for call in calls:
                kernel(*call)
        except BaseException as error:
            errors.append(error)

    if threads == 1:
        take_calls()
    elif _parallel is not None:
        _parallel(_function(take_calls), None, threads, 0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            pool.map(take_calls, range(threads))
    if errors:
        raise errors[0]
