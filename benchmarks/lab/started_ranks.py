"""Ranks that this process starts, tells what to do, and ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.lab.orphans import end_with_parent


class StartedRanks:
    """Ranks on this machine, which end with the context and with this process.

    Args:
        body: called on every rank with its end of a pipe and `arguments`.
        each: ranks on every host; default all.
        address: of rank 0.
        threads: of each rank on a CPU.
        method: of multiprocessing; "forkserver" forks them of a process that has loaded what they
            need, and that ends when it notices that this one has.
        enter: called on a rank, with the number of its host, before anything else.

    Attributes:
        pids: of the ranks.
    """

    def __init__(
        self,
        world_size: int,
        body: Callable[..., object],
        *arguments: Any,
        each: int = 0,
        address: str = "127.0.0.1",
        threads: int = 1,
        method: str = "spawn",
        enter: Callable[[int], object] = id,
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload([body.__module__])
        self.world_size, self.everybody = world_size, range(world_size)
        self.pids: list[int] = []
        self._lines: list[Connection] = []
        self._processes = []
        each, port = each or world_size, free_port()
        for rank in self.everybody:
            env = {
                "RANK": rank, "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each,
                "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": threads,
            }  # fmt: skip
            line, its_line = context.Pipe()
            told = (env, enter, rank // each, body, its_line, *arguments)
            process = context.Process(target=_rank, args=told, daemon=True)
            process.start()
            its_line.close()
            assert process.pid is not None
            self.pids.append(process.pid)
            self._lines.append(line)
            self._processes.append(process)

    def __enter__(self) -> StartedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def tell(self, ranks: Iterable[int], command: str, *arguments: Any, **named: Any) -> None:
        """Send a command with its arguments, which `body` receives as three values."""
        for rank in ranks:
            self._lines[rank].send((command, arguments, named))

    def answers(self, ranks: Iterable[int], limit_s: float | None = 300) -> list[Any]:
        """Return the next answer of each rank.

        Args:
            limit_s: None waits as long as need be.

        Raises:
            TimeoutError: ranks are silent for so long.
            EOFError: a rank has ended; it has said why on the standard error.
        """
        ranks, found = list(ranks), dict[int, Any]()
        while waiting := {self._lines[rank]: rank for rank in ranks if rank not in found}:
            ready = wait(list(waiting), limit_s)
            if not ready:
                raise TimeoutError(f"ranks {[*waiting.values()]} are silent for {limit_s} s")
            for line in ready:
                assert isinstance(line, Connection)
                found[waiting[line]] = line.recv()
        return [found[rank] for rank in ranks]

    def ask(self, command: str, *arguments: Any, **named: Any) -> list[Any]:
        """Tell all ranks, and return their answers."""
        self.tell(self.everybody, command, *arguments, **named)
        return self.answers(self.everybody)


def _rank(
    env: dict[str, Any],
    enter: Callable[[int], object],
    host: int,
    body: Callable[..., object],
    *arguments: Any,
) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    forked = multiprocessing.get_start_method() == "forkserver"
    end_with_parent(os.getppid() if forked else starter.pid or 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    enter(host)
    os.environ.update({name: str(value) for name, value in env.items()})
    body(*arguments)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
