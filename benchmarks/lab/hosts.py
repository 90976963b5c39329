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
import signal
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_TUNSETIFF, _IFF_TAP_NO_PI = 0x400454CA, 0x1002


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
    """

    def __init__(self, count: int, names: str = "resolve", delay_s: float = 0.0) -> None:
        self.count, self.names, self.delay_s = count, names, delay_s
        self.blocked: set[int] = set()
        self._children: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []
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
        for child in self._children:
            child.send_signal(signal.SIGCONT)
            child.kill()
        for child in self._children:
            child.wait()
        self._folder.cleanup()

    def start(self, host: int, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host; its output is one text."""
        inside = ["nsenter", "-t", str(self._pids[host]), "-n", "-u", "-i", "-m"]
        return self._spawn([*inside, f"--wd={os.getcwd()}", *command], env)

    def run(self, host: int, *command: str) -> str:
        text, _ = self.start(host, *command).communicate(timeout=60)
        return text

    def sent(self) -> tuple[int, int]:
        """Return the bytes and packets that all hosts have sent."""
        lines = [self.run(host, "grep", "eth0:", "/proc/net/dev") for host in range(self.count)]
        each = [line.split(":")[1].split() for line in lines]
        return sum(int(n[8]) for n in each), sum(int(n[9]) for n in each)

    def _spawn(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        self._children.append(child)
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
        self._pids.append(holder.pid)

    def _plug_in(self, host: int) -> None:
        def make() -> None:  # a namespace belongs to a thread, a TAP to that in which it is made
            with open(f"/proc/{self._pids[host]}/ns/net") as namespace:
                assert _libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP_NO_PI))
            self._taps.append(tap)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        self.run(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self.run(host, "ip", "link", "set", "eth0", "up")
        self.run(host, "ip", "route", "add", "default", "dev", "eth0")

    def _switch(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            left_s = waiting[0][0] - time.monotonic() if waiting else 0.5
            ready, _, _ = select.select(self._taps, [], [], max(0.0, left_s))
            for tap in ready:
                try:
                    frame = os.read(tap, 2**16)
                except OSError:  # its cable is pulled
                    continue
                source = self._taps.index(tap)
                for host in {*range(self.count)} - {source}:
                    if not {host, source} & self.blocked:
                        number += 1
                        due = time.monotonic() + self.delay_s
                        heapq.heappush(waiting, (due, number, host, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(waiting)
                try:
                    os.write(self._taps[host], frame)
                except OSError:  # its cable is pulled
                    continue
