"""`vllm serve` over two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from benchmarks.engines.server import Server, variables
from benchmarks.lab import hosts
from benchmarks.lab.hosts import Hosts

HOSTS = 2
MEMORY_GB = 12


def obstacle() -> str:
    """Say why there can be no such server here, or nothing."""
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    few = f"it needs {MEMORY_GB} GB of memory, and there are {gigabytes:.0f}"
    return hosts.obstacle() or (few if gigabytes < MEMORY_GB else "")


class ServerOnHosts(Server):
    """A server with a rank on every host; the first host answers."""

    def __enter__(self) -> Server:
        """Start it on every host.

        Raises:
            RuntimeError: there can be none here.
        """
        if said := obstacle():
            raise RuntimeError(f"{self.kind.name}: not run: {said}")
        self._hosts = Hosts(HOSTS).__enter__()
        self._process, *self._others = [self._start(host) for host in range(HOSTS)]
        self.inside = ["nsenter", "-t", str(self._hosts.holders[0]), "-n"]
        return self

    def _start(self, host: int) -> subprocess.Popen[Any]:
        log = "server.log" if host == 0 else f"server-{host}.log"
        (self.folder / log).write_text("")
        words = [
            *(*self.command, "--nnodes", str(HOSTS), "--node-rank", str(host)),
            *("--master-addr", self._hosts.address(0), "--distributed-executor-backend", "mp"),
            *(["--headless"] if host else []),
        ]
        own = {"VLLM_HOST_IP": self._hosts.address(host), "LOG": str(self.folder / log)}
        to_log = ("bash", "-c", 'exec "$@" > "$LOG" 2>&1', "-")
        return self._hosts.start(host, *to_log, *words, **variables(self.kind, self.folder), **own)

    def __exit__(self, *error: object) -> None:
        for other in self._others:
            other.terminate()
        super().__exit__(*error)
        self._hosts.__exit__(*error)

    def log(self) -> str:
        """Return the output of all hosts."""
        logs = sorted(self.folder.glob("server*.log"))
        return "".join(path.read_text(errors="replace") for path in logs)

    def _answers(self) -> bool:
        return "Application startup complete" in self.log()
