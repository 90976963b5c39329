"""Several hosts on one Linux machine: a network stack, a host name and a /dev/shm for each.

A host is some namespaces that one process holds. A TAP is its cable, and a thread of this script
is the switch: it carries each frame to the other hosts, later by a delay, or loses it. Every
process dies with the script, and the kernel then removes what was theirs.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lab.orphans import end_with_parent
from benchmarks.lab.started_ranks import StartedRanks

_libc = ctypes.CDLL(None, use_errno=True)
_TUNSETIFF, _IFF_TAP_NO_PI = 0x400454CA, 0x1002
_IFF_VNET_HDR, _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS = 0x4000, 0x400454D0, 7
_MTU_FRAME, _HEADERS = 1514, 66


def obstacle() -> str:
    """Say why there can be no hosts here, or nothing."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "it makes network namespaces, so it needs root"
    if missing:
        return f"it needs {', '.join(missing)}, of iproute2 and util-linux"
    return "" if os.path.exists("/dev/net/tun") else "it needs /dev/net/tun"


class Hosts:
    """Hosts that live as long as the context.

    Args:
        names: what /etc/hosts says: "resolve" (every name is its address), "loopback" (a host's own
            name is 127.0.1.1, as Debian writes it) or "none".
        whole_segments: a frame may have 64 KB, so that the switch does not limit the rate. The
            counters then count such frames.

    Attributes:
        delay_s, bits_per_s: of every cable, in each direction. A queue is as long as need be.
        blocked: hosts whose frames are lost.
        at_end: called when the hosts end.
        holders: the process that holds a host's namespaces, for each.
    """

    def __init__(self, count: int, names: str = "resolve", *, whole_segments: bool = False) -> None:
        self.count, self.names, self._whole_segments = count, names, whole_segments
        self.delay_s, self.bits_per_s = 0.0, float("inf")
        self.blocked: set[int] = set()
        self.at_end: list[Callable[[], object]] = []
        self.holders: list[int] = []
        self._taps: list[int] = []

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")
        for host in range(self.count):
            self._hold(host)
            self._plug_in(host)
        threading.Thread(target=self._switch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.at_end:
            end()
        self._folder.cleanup()

    def start(self, host: int, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host; its output is one text."""
        inside = ["nsenter", "-t", str(self.holders[host]), "-n", "-u", "-i", "-m"]
        return self._spawn([*inside, f"--wd={os.getcwd()}", *command], env)

    def run(self, host: int, *command: str) -> str:
        text, _ = self.start(host, *command).communicate(timeout=60)
        return text

    def sent(self) -> tuple[int, int]:
        """Return the bytes and packets that all hosts have sent."""
        texts = [Path(f"/proc/{holder}/net/dev").read_text() for holder in self.holders]
        each = [text.split("eth0:")[1].split() for text in texts]
        return sum(int(n[8]) for n in each), sum(int(n[9]) for n in each)

    def _spawn(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self.at_end += child.kill, child.wait
        return child

    def _hold(self, host: int) -> None:
        lines = ["127.0.0.1 localhost"]
        for other in range(self.count) if self.names != "none" else ():
            own = other == host and self.names == "loopback"
            lines.append(f"{'127.0.1.1' if own else self.address(other)} node-{other}")
        file = Path(self._folder.name) / f"hosts-{host}"
        file.write_text("\n".join(lines) + "\n")
        script = (
            f"hostname node-{host} && mount -t tmpfs tmpfs /dev/shm && "
            f"mount --bind {file} /etc/hosts && ip link set lo up && echo ready && "
            "exec sleep infinity"
        )
        holder = self._spawn(["unshare", "-n", "-u", "-i", "-m", "bash", "-c", script], {})
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "ready\n":
            raise RuntimeError(f"no namespaces here: {said}")
        self.holders.append(holder.pid)

    def _plug_in(self, host: int) -> None:
        def make() -> None:  # a namespace belongs to a thread, a TAP to that in which it is made
            _enter(self.holders[host], "net")
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _IFF_TAP_NO_PI | (_IFF_VNET_HDR if self._whole_segments else 0)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", flags))
            if self._whole_segments:
                fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS)
            self._taps.append(tap)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        self.run(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self.run(host, "ip", "link", "set", "eth0", "up")
        self.run(host, "ip", "route", "add", "default", "dev", "eth0")

    def _switch(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number, free = 0, [0.0] * self.count
        while True:
            left_s = waiting[0][0] - time.monotonic() if waiting else 0.5
            ready, _, _ = select.select(self._taps, [], [], max(0.0, left_s))
            for tap in ready:
                try:
                    frame = os.read(tap, 2**17)
                except OSError:  # its cable is pulled
                    continue
                source = self._taps.index(tap)
                size = len(frame) + _HEADERS * (len(frame) // _MTU_FRAME)
                free[source] = max(free[source], time.monotonic()) + 8 * size / self.bits_per_s
                for host in {*range(self.count)} - {source}:
                    if not {host, source} & self.blocked:
                        number += 1
                        heapq.heappush(waiting, (free[source] + self.delay_s, number, host, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(waiting)
                try:
                    os.write(self._taps[host], frame)
                except OSError:  # its cable is pulled
                    continue


class RanksOnHosts(StartedRanks):
    """Ranks on hosts, `each` on every one, which have sent something when they are ready.

    Raises:
        EOFError: a rank has ended; it has said why on the standard error.
    """

    def __init__(self, hosts: Hosts, each: int, body: Callable[..., None], *arguments: Any) -> None:
        # Else torch warns of hosts without names.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        super().__init__(
            hosts.count * each,
            body,
            *arguments,
            each=each,
            address=hosts.address(0),
            method="forkserver",
            enter=partial(_go_to, hosts.holders),
        )
        hosts.at_end.append(self.__exit__)
        self.answers(self.everybody)


def _go_to(holders: list[int], host: int) -> None:
    """Bring this process to a host."""
    here = os.getcwd()
    for kind in ("net", "uts", "ipc", "mnt"):
        _enter(holders[host], kind)
    os.chdir(here)


def _enter(pid: int, kind: str) -> None:
    with open(f"/proc/{pid}/ns/{kind}") as namespace:
        assert _libc.setns(namespace.fileno(), 0) == 0
