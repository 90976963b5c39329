"""`make hosts`: several hosts on one machine. Starts, exchanges, latencies, bytes, and faults.

    python -m tests.hosts [starts] [exchanges] [faults]

It counts what does not depend on how busy the machine is: tokens, bytes, packets, and one-way
latencies under a delay beside which all else is small. It ends with status 1 if a count is wrong.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lab.hosts import Hosts, obstacle

TIMEOUT_S, PROMISED_S, DELAY_S = 4.0, 2.0, 0.04
# Bytes and packets of a plain step of 1, 8 and 64 rows on two hosts of two ranks, when a step still
# took several messages.
BYTES_BEFORE = {1: (6874, 59), 8: (15261, 137), 64: (17184, 141)}


class Job:
    """Ranks on hosts, `ranks` on each, which take commands."""

    def __init__(self, hosts: Hosts, ranks: int) -> None:
        self.world_size = hosts.count * ranks
        self.ranks: list[subprocess.Popen[str]] = []
        self._lines: list[queue.Queue[str]] = []
        for rank in range(self.world_size):
            env = {
                "RANK": rank, "WORLD_SIZE": self.world_size,
                "LOCAL_RANK": rank % ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": hosts.address(0), "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            command = (sys.executable, "-m", "tests.hosts.worker", str(TIMEOUT_S))
            texts = {name: str(value) for name, value in env.items()}
            self.ranks.append(hosts.start(rank // ranks, *command, **texts))
            self._lines.append(queue.Queue())
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        self.answers(range(self.world_size), "ready", 120)

    def _read(self, rank: int) -> None:
        for line in self.ranks[rank].stdout or ():
            self._lines[rank].put(line)

    def tell(self, ranks: Sequence[int], *command: Any, **changes: Any) -> None:
        for rank in ranks:
            stdin = self.ranks[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps([*command, changes]) + "\n")
            stdin.flush()

    def answers(self, ranks: Sequence[int], begin: str = "{", limit_s: float = 60) -> list[Any]:
        found = []
        for rank in ranks:
            seen: list[str] = []
            while not (seen and seen[-1].startswith(begin)):
                try:
                    seen.append(self._lines[rank].get(timeout=limit_s))
                except queue.Empty:
                    said = "".join(seen[-20:])
                    raise AssertionError(f"rank {rank} is silent for {limit_s} s: {said}") from None
            found.append(json.loads(seen[-1]) if begin == "{" else seen[-1])
        return found

    def steps(self, exchange: str, rows: int, count: int, **changes: Any) -> float:
        """Take right steps on all ranks; return the seconds of the shortest, on the last rank."""
        everybody = range(self.world_size)
        self.tell(everybody, "steps", exchange, rows, count, **changes)
        answers = self.answers(everybody)
        assert all(answer.get("wrong") == 0 for answer in answers), answers
        return float(max(answer["took"] for answer in answers))


def starts() -> None:
    """`launch/nodes.sh` with every kind of names, and with an address that is none of them."""
    for names, first in (("none", "10.77.0.1"), ("loopback", "node-0"), ("resolve", "node-0")):
        with Hosts(2, names) as hosts:
            env = {"FIRST": first, "NNODES": "2", "NPROC": "1", "WAIT": "60"}
            nodes = [hosts.start(host, "launch/nodes.sh", "doctor", **env) for host in range(2)]
            texts = [node.communicate(timeout=150)[0] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], texts
            done = [kind for kind in ("collective", "p2p") if f"{kind}: ok" in texts[0]]
            assert done == ["collective", "p2p"], texts[0]
            print(f"names {names}: doctor on two hosts is ok", flush=True)
    with Hosts(1) as hosts:
        began = time.monotonic()
        env = {"FIRST": "10.77.0.9", "NNODES": "2"}
        text, _ = hosts.start(0, "launch/nodes.sh", "doctor", **env).communicate(timeout=60)
        assert text.count("\n") == 1 and "did not answer" in text, text
        assert time.monotonic() - began < 30
        print(f"a wrong address: {text}", end="", flush=True)


def exchanges() -> None:
    """Latencies under a delay, then bytes and packets, of every exchange on 2 hosts of 2 ranks."""
    with Hosts(2) as hosts:
        job = Job(hosts, 2)
        for exchange in ("collective", "p2p", "two_level"):
            for rows, before in BYTES_BEFORE.items():
                job.steps(exchange, rows, 2)
                hosts.delay_s = DELAY_S
                latencies = job.steps(exchange, rows, 6) / DELAY_S
                hosts.delay_s = 0.0
                since, count = hosts.sent(), 10
                job.steps(exchange, rows, count)
                time.sleep(0.3)  # the last acknowledgements
                wire = [(b - a) / count for a, b in zip(since, hosts.sent(), strict=True)]
                print(
                    f"{exchange}, {rows} rows: {latencies:.1f} latencies, "
                    f"{wire[0]:.0f} B in {wire[1]:.0f} packets",
                    flush=True,
                )
                assert latencies < 3, "one message to every peer takes 2"
                assert wire[0] < before[0] and wire[1] < before[1], f"before: {before}"
            hosts.delay_s = DELAY_S
            latencies = job.steps(exchange, 8, 6, top_k=50) / DELAY_S
            hosts.delay_s = 0.0
            print(f"{exchange}, 8 rows with top_k: {latencies:.1f} latencies", flush=True)
            assert latencies < 5, "two messages to every peer take 4"


def faults() -> None:
    """Every fault under two exchanges: who lives says so in time, and reset() recovers."""
    for exchange, count, ranks in (("collective", 3, 1), ("two_level", 2, 2)):
        with Hosts(count) as hosts:
            _faults(hosts, Job(hosts, ranks), exchange, ranks)


def _faults(hosts: Hosts, job: Job, exchange: str, ranks: int) -> None:
    last = hosts.count - 1
    of_last = range(last * ranks, job.world_size)

    def signal_last(number: signal.Signals) -> None:
        for rank in of_last:
            job.ranks[rank].send_signal(number)

    def plug_last(state: str) -> None:
        hosts.run(last, "ip", "link", "set", "eth0", state)
        if state == "up":
            hosts.run(last, "ip", "route", "add", "default", "dev", "eth0")

    job.steps(exchange, 8, 3)
    hosts.blocked.add(last)
    threading.Timer(2.5, hosts.blocked.clear).start()
    job.steps(exchange, 8, 1)
    print(f"{exchange}, 2.5 s without frames: nobody is lost", flush=True)
    for name, cut, do, undo in (
        ("partition", of_last, lambda: hosts.blocked.add(last), hosts.blocked.clear),
        ("partition of host 0", range(ranks), lambda: hosts.blocked.add(0), hosts.blocked.clear),
        ("unplugged", of_last, lambda: plug_last("down"), lambda: plug_last("up")),
        (
            "stopped",
            of_last,
            lambda: signal_last(signal.SIGSTOP),
            lambda: signal_last(signal.SIGCONT),
        ),
    ):
        _break(job, exchange, name, do, undo, cut)
    signal_last(signal.SIGKILL)
    _lost(job, exchange, "killed", range(last * ranks), of_last)


def _break(
    job: Job, exchange: str, name: str, do: Callable[[], Any], undo: Callable[[], Any], cut: range
) -> None:
    """Break something, hear of it on every rank, repair it, and reset all ranks."""
    do()
    everybody = range(job.world_size)
    heard = [rank for rank in everybody if name != "stopped" or rank not in cut]
    _lost(job, exchange, name, heard, cut)
    if name == "stopped":
        job.tell(list(cut), "steps", exchange, 8, 10**6)
    undo()
    if name == "stopped":
        assert all("lost" in answer for answer in job.answers(cut))
    job.tell(everybody, "reset", exchange)
    assert job.answers(everybody) == [{}] * job.world_size
    job.steps(exchange, 8, 3)


def _lost(job: Job, exchange: str, name: str, heard: Sequence[int], cut: Sequence[int]) -> None:
    """Take a step on the ranks that can; each ends in time, and names who is lost or the store."""
    job.tell(heard, "steps", exchange, 8, 10**6)
    for rank, answer in zip(heard, job.answers(heard), strict=True):
        print(
            f"{exchange}, {name}: rank {rank} after {answer['after']:.1f} s: {answer['lost']}",
            flush=True,
        )
        assert answer["after"] < TIMEOUT_S + PROMISED_S, answer
        whole = set(answer["lost"]) == (
            set(range(job.world_size)) - set(cut) if rank in cut else set(cut)
        )
        assert whole or "the store of the process group on" in answer["text"], answer


def main() -> None:
    if said := obstacle():
        sys.exit(f"make hosts: not here: {said}")
    parts = {"starts": starts, "exchanges": exchanges, "faults": faults}
    for name in sys.argv[1:] or parts:
        parts[name]()
    print("ok")


if __name__ == "__main__":
    main()
