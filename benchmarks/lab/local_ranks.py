"""Starts ranks on this machine, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

from benchmarks.lab.orphans import end_with_parent
from tpsample.distributed import join

TIMEOUT_S = 300.0
"""How long a rank waits for another: loading libraries and compiling may take minutes."""


def run_on_ranks(
    world_size: int, threads: int, body: Callable[..., object], *arguments: Any
) -> int:
    """Call `body(job, *arguments)` on ranks, each a process; the first that fails ends all.

    Args:
        threads: of each rank, on a CPU.
        body, arguments: what pickle can carry.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    variables = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(threads),
    }
    context = multiprocessing.get_context("spawn")
    processes = []
    try:
        for rank in map(str, range(world_size)):
            process = context.Process(target=_rank, args=(os.getpid(), body, *arguments))
            with patch.dict(os.environ, {**variables, "RANK": rank, "LOCAL_RANK": rank}):
                process.start()
            processes.append(process)
        while waiting := [each.sentinel for each in processes if each.exitcode is None]:
            if any(each.exitcode for each in processes):
                break
            wait(waiting)
        return next((each.exitcode for each in processes if each.exitcode), 0)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(parent: int, body: Callable[..., object], *arguments: Any) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the parent gets, too
    with join(timeout_s=TIMEOUT_S) as job:
        body(job, *arguments)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
