"""Runs one function on several gloo ranks, one process each.

    results = run_ranks(4, body, *args)        # body(*args) inside an initialised process group

Processes are forked from a server that has loaded what they import: eight ranks start in a fraction
of a second. Nothing outlives the call, whatever a rank does.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.interpreter import spare_repetitions
from tests.support.limits import slowness

_AFTER_FIRST_ERROR_S = 2.0


class RankFailed(AssertionError):
    """The errors by rank, with the tracebacks of the processes."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240,
    group_timeout_s: float | None = None,
    victim: int | None = None,
) -> list[Any]:
    """fn(*args) on every rank of a gloo group; the results in rank order.

    Args:
        fn: a module-level function; it finds its rank through torch.distributed.
        args, results: anything pickle can carry, tensors too.
        timeout_s: for the whole call, and for every collective unless group_timeout_s says else;
            times `slowness()`.
        group_timeout_s: for every collective, times `slowness()`.
        victim: a rank that must be killed; its result is None.

    Raises:
        RankFailed: a rank raised, died or was not done in time.
    """
    timeout_s *= slowness()
    group_timeout_s = timeout_s if group_timeout_s is None else group_timeout_s * slowness()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, receivers = [], []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, store, group_timeout_s, sender, fn, args),
                    daemon=True,
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            outcomes = _receive(receivers, timeout_s, victim)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    if victim is not None:
        outcomes[victim] = (None if victim not in outcomes else "was not killed", None)
    failed = {rank: error for rank, (error, _) in outcomes.items() if error}
    for rank in range(world_size):
        if rank not in outcomes:
            failed[rank] = f"not done within {timeout_s} s, or stopped after another rank failed"
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {error}" for rank, error in failed.items()))
    return [outcomes[rank][1] for rank in range(world_size)]


def same_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Return the result of fn(*args), which must be the same on every rank; see `run_ranks`."""
    first, *others = run_ranks(world_size, fn, *args, **how)
    assert all(other == first for other in others), (first, *others)
    return first


def _receive(
    receivers: list[Connection], timeout_s: float, victim: int | None
) -> dict[int, tuple[str | None, Any]]:
    """(error, result) of the ranks that reported, in the order in which they did."""
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    outcomes: dict[int, tuple[str | None, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), timeout=left_s):
            rank = waiting.pop(receiver)  # type: ignore[call-overload]
            try:
                outcomes[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                if rank == victim:
                    continue
                outcomes[rank] = ("the process died", None)
            if outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + _AFTER_FIRST_ERROR_S * slowness())
    return outcomes


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    spare_repetitions()
    try:
        meeting = dist.FileStore(store, world_size)
        dist.init_process_group(
            "gloo",
            store=meeting,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # A rank that is to die must not do so while another still connects to it.
        meeting.set(f"connected {rank}", "")
        meeting.wait([f"connected {other}" for other in range(world_size)])
        outcome: tuple[str | None, Any] = (None, fn(*args))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    sender.send_bytes(pickle.dumps(outcome))
    if outcome[0] is None:
        dist.destroy_process_group()
