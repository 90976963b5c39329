"""Joins a job started by torchrun, mpirun or Slurm. A process started by hand is alone.

    with join() as job:
        sampler = LMHeadSampler(weight, shard=VocabShard.even(V, job.rank, job.world_size))

The place is looked for in this order: torchrun's variables; mpi4py, if a launcher of MPI started
this process; the launcher's own variables together with MASTER_ADDR and MASTER_PORT. Without any of
them the process is alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from tpsample.agreement.misplaced import collective
from tpsample.core.checks import describe, real_number
from tpsample.ranks.addresses import address_towards, answers, interface_of
from tpsample.ranks.process import LAUNCHERS, ranks_of
from tpsample.ranks.ranks import gather_or_raise

log = logging.getLogger(__name__)

_LONGEST_S = 10**9
_INTERFACE = "GLOO_SOCKET_IFNAME"
_WAY_OUT = "start with torchrun, or with mpirun and the package mpi4py"


class LaunchError(RuntimeError):
    """The environment names a job that cannot be joined. The message names the variable."""


def _gathered(value: Any, error: Exception | None) -> list[Any]:
    """Return every rank's value, or raise the errors of some on every rank. Collective."""
    ranks = ranks_of(None)
    with ranks.during("gather"):
        records = gather_or_raise(ranks, {"value": value}, error)
    return [record["value"] for record in records]


@dataclass(frozen=True)
class Job:
    """Where this process stands in its job, and on its machine, and who says so.

    Attributes:
        device: what this rank computes on, once the job is joined.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "alone"  # or "mpi4py", or a name in LAUNCHERS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @collective(lambda _, error: _gathered(None, error))
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. JSON must be able to carry it. Collective.

        Raises:
            TypeError, ValueError: it is not, on a rank alone.
            RankMismatch: it is not, on some of several ranks; all raise it.
        """
        error = None
        try:
            json.dumps(value)
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        return _gathered(value, error)


@contextmanager
def join(*, timeout_s: float = 60.0) -> Iterator[Job]:
    """Join the job this process was started in: NCCL if there are GPUs, else gloo.

    Creates the default process group and destroys it at the end; a world of one has none. On the
    CPU the ranks share all cores but one, unless OMP_NUM_THREADS says otherwise. At the end torch
    has as many threads as before, and GLOO_SOCKET_IFNAME is unset again if it was.

    Args:
        timeout_s: how long a rank waits for another before it raises.

    Raises:
        LaunchError: the launcher's variables are not enough, or there are more ranks than GPUs.
        ValueError: a timeout that is no number of seconds.
    """
    if not 0 < real_number(timeout_s) <= _LONGEST_S:
        raise ValueError(
            f"timeout_s: expected seconds above 0, up to {_LONGEST_S}, got {describe(timeout_s)}"
        )
    job, store = _find(timedelta(seconds=timeout_s))
    device = device_of(job)
    with _settings_of_process(job, device):
        if job.world_size > 1:
            _init_group(job, store, device, timeout_s)

        failed = True
        try:
            yield replace(job, device=device)
            failed = False
        finally:
            # Destroying NCCL waits for peers that may wait for this rank, whose exit tells them.
            if job.world_size > 1 and not (failed and device.type == "cuda"):
                dist.destroy_process_group()


@contextmanager
def _settings_of_process(job: Job, device: torch.device) -> Iterator[None]:
    """Let a job set torch's threads, and the interface of gloo, as long as it lasts."""
    threads, interface = torch.get_num_threads(), os.environ.get(_INTERFACE)
    fewer = device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ
    if fewer:
        torch.set_num_threads(min(threads, _fair_threads(job.local_world_size)))
    try:
        yield
    finally:
        if fewer:
            torch.set_num_threads(threads)
        if interface is None:
            os.environ.pop(_INTERFACE, None)


def from_environment(env: Mapping[str, str]) -> Job:
    """Return the place that the variables of a launcher name, or that of a lone process.

    Raises:
        LaunchError: some of a launcher's variables are missing or are not numbers in range.
    """
    for source, names in LAUNCHERS.items():
        if (names[1] if source == "Slurm" else names[0]) not in env:
            continue
        rank, world_size, local_rank, local_world_size = (_number(env, n, source) for n in names)
        if rank >= world_size:
            raise LaunchError(f"{names[0]}={rank}: expected less than {names[1]}={world_size}")
        if local_world_size == 0:
            raise LaunchError(f"{names[3]}=0: expected the number of ranks on this machine, from 1")
        if local_rank >= local_world_size and source != "Slurm":  # which names that of one machine
            raise LaunchError(
                f"{names[2]}={local_rank}: expected less than {names[3]}={local_world_size}"
            )
        return Job(rank, world_size, local_rank, local_world_size, source)
    return Job()


def _number(env: Mapping[str, str], name: str, source: str) -> int:
    if name not in env:
        raise LaunchError(
            f"{name}: not set, although other variables of {source} are; set it, or {_WAY_OUT}"
        )
    # Slurm writes tasks per node as "4(x2),3".
    number = re.match(r"\d{1,9}(?=$|\(|,)", env[name].strip())
    if number is None:
        raise LaunchError(
            f"{name}={describe(env[name])}: expected a number >= 0, below 10^9, as {source} sets"
        )
    return int(number[0])


def _find(timeout: timedelta) -> tuple[Job, Store | None]:
    """Return this process's place, and a store where MPI made one."""
    job = from_environment(os.environ)
    if job.source not in ("Open MPI", "MPICH") or job.world_size == 1:
        return job, None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        log.info("without mpi4py (%s), by the variables of %s", error, job.source)
        return job, None
    world = MPI.COMM_WORLD
    if world.size != job.world_size:
        log.warning("mpi4py is built for another MPI than %s; using its variables", job.source)
        return job, None

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    job = Job(world.rank, world.size, node.rank, node.size, "mpi4py")
    if job.rank == 0:
        host = host_address(job)
        store = TCPStore(host, 0, job.world_size, True, timeout, wait_for_workers=False)
        world.bcast((host, store.port))
    else:
        host, port = world.bcast(None)
        store = TCPStore(host, port, job.world_size, False, timeout)
    return job, store


def _fair_threads(local_world_size: int) -> int:
    """Return how many threads per rank leave one core to others.

    Threads spin while they wait for each other. With as many as there are cores, one other busy
    process makes a step many times slower: 6 tokens of the bundled model on 2 cores took 1.2 s with
    two threads or, beside other work, 29 s; with one they always took 2.0 s.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // local_world_size)


def host_address(place: Job) -> str:
    """Return an address of this machine that all ranks reach."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    try:
        return address_towards(socket.gethostname())
    except OSError:
        return socket.gethostname()


def device_of(place: Job) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if max(place.local_rank + 1, place.local_world_size) > gpus:
        raise LaunchError(
            f"{place.local_world_size} ranks on this machine, {gpus} GPUs visible to rank "
            f"{place.rank}: start at most {gpus}, make every GPU of the machine visible to every "
            "rank, or hide them with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _init_group(job: Job, store: Store | None, device: torch.device, timeout_s: float) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if store is None and name not in os.environ:
            raise LaunchError(
                f"{name}: not set, and {job.source} alone does not tell where rank 0 is; set "
                f"MASTER_ADDR and MASTER_PORT, an address and a free port there, or {_WAY_OUT}"
            )
    port = os.environ.get("MASTER_PORT", "")
    if store is None and not (port.isdecimal() and int(port[:6]) < 2**16):
        raise LaunchError(
            f"MASTER_PORT={describe(port)}: expected a free port of rank 0's machine, below 65536"
        )
    gpu = device.type == "cuda"
    first = os.environ["MASTER_ADDR"] if store is None else store.host  # type: ignore[attr-defined]
    try:
        _choose_interface(job, first)
        # The pauses of torch's client grow beyond its limit.
        if store is None and job.rank > 0 and not answers(first, int(port), timeout_s):
            raise TimeoutError(f"nobody listened at {first}:{port} within {timeout_s:.0f} s")
        if store is None and job.rank > 0 and not _is_store(first, int(port), timeout_s):
            raise LaunchError(
                f"MASTER_PORT={port}: what listens there at {first} does not answer as rank 0 "
                "does, so it may be another program; set another free port, the same on every rank"
            )
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if gpu else None,
        )
    except LaunchError:
        raise
    except (RuntimeError, OSError) as error:  # gloo knows no interface of that name, for one
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"MASTER_PORT={port}: another program of this machine, rank 0's, listens there; "
                "set another free port, the same on every rank"
            ) from error
        raise LaunchError(
            f"rank {job.rank} does not reach all others; the ranks meet on {first}, and its "
            f"interface is {os.environ.get(_INTERFACE, 'that of its name')}. Set "
            f"{_INTERFACE} to the interface that leads to the other machines, and MASTER_ADDR "
            f"to an address of rank 0's. {(str(error).splitlines() or [''])[0][:200]}"
        ) from error


def _is_store(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a store answers there in time. Torch itself waits for ever if nothing does."""
    answered: list[Store] = []

    def call() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=timeout_s)
            answered.append(TCPStore(host, port, None, False, limit, wait_for_workers=False))

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(timeout_s)
    return bool(answered)


def _choose_interface(job: Job, first: str) -> None:
    """Let gloo take the interface that leads to the first machine.

    By default it takes the address of this machine's name, which need not lead anywhere.
    """
    if job.local_world_size < job.world_size and _INTERFACE not in os.environ:
        interface = interface_of(address_towards(first))
        if interface is not None:
            os.environ[_INTERFACE] = interface
