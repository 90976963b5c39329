"""Calls of a kernel that share a range among the threads of PyTorch (`torch.get_num_threads`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

THREAD_WORK = 2**21
"""Multiplications that are worth another thread: about 0.1 ms."""

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


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
    calls = [arguments(bounds[t], bounds[t + 1], t) for t in range(threads)]
    others = [_pool(threads - 1).submit(kernel, *each) for each in calls[1:]]
    kernel(*calls[0])
    for other in others:
        other.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the threads of this process; a forked child has none of its parent's."""
    key = os.getpid(), threads
    if key not in _pools:
        _pools.clear()
        _pools[key] = ThreadPoolExecutor(threads, "tpsample")
    return _pools[key]
