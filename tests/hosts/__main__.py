"""`make hosts`: several hosts on one machine. Starts, exchanges, latencies, bytes, and faults.

    python -m tests.hosts [starts] [exchanges] [faults]

It counts what does not depend on how busy the machine is: tokens, bytes, packets, and one-way
latencies under a delay beside which all else is small. It ends with status 1 if a count is wrong.
The starts run beside each other, then the exchanges beside the faults.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.lab.hosts import Hosts, RanksOnHosts, obstacle
from tests.support.limits import measure_slowness, slowness

TIMEOUT_S, PROMISED_S, DELAY_S = 4.0, 2.0, 0.04
# Bytes and packets of a plain step of 1, 8 and 64 rows on two hosts of two ranks. They were counted
# when a step still took several messages.
BYTES_BEFORE = {1: (6874, 59), 8: (15261, 137), 64: (17184, 141)}
# Beside a plain step: the request of every row, and most one-way latencies of 1 and of 64 rows.
PROCESSED = {"logprobs": 5, "logprobs_mode": "processed_logprobs"}
KINDS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "top_k 50 with top_p": ({"top_k": 50, "top_p": 0.9}, (1.9, 1.9)),
    "top_k 300 with top_p": ({"top_k": 300, "top_p": 0.9}, (1.9, 2.9)),
    "top_p": ({"top_p": 0.9}, (2.9, 2.9)),
    "logprobs": ({"logprobs": 5}, (2.9, 2.9)),
    "logprobs of top_k 50": ({"logprobs": 5, "top_k": 50}, (2.9, 2.9)),
    "processed logprobs of top_p": ({"top_p": 0.9, **PROCESSED}, (3.9, 5.9)),
    "kept sets": ({"kept_cap": 100}, (2.9, 2.9)),
    "kept sets of top_k 50": ({"top_k": 50, "kept_cap": 100}, (1.9, 1.9)),
    "kept sets of top_p": ({"top_p": 0.9, "kept_cap": 100}, (3.9, 5.9)),
    "rejection": ({"method": "rejection"}, (3.9, 3.9)),
    "block": ({"method": "block"}, (3.9, 3.9)),
}
# How the call of the last rank differs, and the beginning of every rank's error.
DIFFERENCES = {
    "rows": "hidden_states rows: must be the same on every rank",
    "call": "call: every rank must make the same call",
    "slots": "slots: row 0: must be the same on every rank",
}


def say(text: str) -> None:
    print(text, flush=True)


def start_ranks(hosts: Hosts, each: int) -> RanksOnHosts:
    from tests.hosts.worker import serve  # it imports torch, which `main` takes the time of

    return RanksOnHosts(hosts, each, serve, TIMEOUT_S)


def steps(job: RanksOnHosts, exchange: str, rows: int, count: int, **changes: Any) -> float:
    """Take right steps on all ranks; return the mean seconds of one, on the slowest rank."""
    answers = job.ask("steps", exchange, rows, count, **changes)
    assert all(answer.get("wrong") == 0 for answer in answers), answers
    return float(max(answer["took"] for answer in answers))


def latencies_of(
    job: RanksOnHosts, hosts: Hosts, exchange: str, rows: int, most: float = 1.9, **changes: Any
) -> float:
    """Return how many one-way latencies a step takes on average, under a delay.

    Other work lengthens steps and shortens none, so steps above the limit are taken again.

    Args:
        most: what they may take; a plain step takes one message to every peer, so one.
    """
    hosts.delay_s = DELAY_S
    least = float("inf")
    for _ in range(5):
        least = min(least, steps(job, exchange, rows, 6, **changes) / DELAY_S)
        if least < most:
            break
    hosts.delay_s = 0.0
    assert least < most, f"{least:.1f} latencies, at most {most} were expected"
    return least


def start_by(names: str, first: str) -> None:
    """`launch/nodes.sh` on two hosts with one kind of names."""
    with Hosts(2, names) as hosts:
        wait_s = f"{60 * slowness():.0f}"
        env = {"FIRST": first, "NNODES": "2", "NPROC": "1", "WAIT": wait_s}
        nodes = [hosts.start(host, "launch/nodes.sh", "doctor", **env) for host in range(2)]
        texts = [node.communicate(timeout=150 * slowness())[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], texts
        done = [kind for kind in ("collective", "p2p") if f"{kind}: ok" in texts[0]]
        assert done == ["collective", "p2p"], texts[0]
        say(f"names {names}: doctor on two hosts is ok")


def start_by_wrong_address() -> None:
    with Hosts(1) as hosts:
        began = time.monotonic()
        env = {"FIRST": "10.77.0.9", "NNODES": "2"}
        text, _ = hosts.start(0, "launch/nodes.sh", "doctor", **env).communicate(timeout=60)
        assert text.count("\n") == 1 and "did not answer" in text, text
        assert time.monotonic() - began < 30
        say(f"a wrong address: {text.strip()}")


def exchanges() -> None:
    """Latencies under a delay, bytes and packets, and calls that differ, on 2 hosts of 2 ranks."""
    with Hosts(2) as hosts:
        job = start_ranks(hosts, 2)
        for exchange in ("collective", "p2p", "two_level"):
            for rows, before in BYTES_BEFORE.items():
                steps(job, exchange, rows, 2)
                latencies = latencies_of(job, hosts, exchange, rows)
                since, count = hosts.sent(), 10
                steps(job, exchange, rows, count)
                time.sleep(0.3)  # the last acknowledgements
                wire = [(b - a) / count for a, b in zip(since, hosts.sent(), strict=True)]
                say(
                    f"{exchange}, {rows} rows: {latencies:.1f} latencies, "
                    f"{wire[0]:.0f} B in {wire[1]:.0f} packets"
                )
                assert wire[0] < before[0] and wire[1] < before[1], f"before: {before}"
            most = 2.9 if exchange == "two_level" else 1.9
            latencies = latencies_of(job, hosts, exchange, 8, most, top_k=50)
            say(f"{exchange}, 8 rows with top_k: {latencies:.1f} latencies")
            for how, begin in DIFFERENCES.items():
                errors = job.ask("differ", exchange, how)
                assert len(set(errors)) == 1, errors
                kind, text = errors[0]
                assert kind == "RankMismatch" and text.startswith(begin), errors
                say(f"{exchange}, other {how} on the last rank: {text}")
                steps(job, exchange, 8, 1)
        for name, (changes, limits) in KINDS.items():
            found = [
                latencies_of(job, hosts, "collective", rows, most, **changes)
                for rows, most in zip((1, 64), limits, strict=True)
            ]
            say(f"{name}, 1 and 64 rows: {found[0]:.1f} and {found[1]:.1f} latencies")


def faults(exchange: str, count: int, each: int) -> None:
    """Every fault: who lives says so in time, and reset() recovers."""
    with Hosts(count) as hosts:
        job, last = start_ranks(hosts, each), count - 1
        of_last = range(last * each, job.world_size)

        def signal_last(number: signal.Signals) -> None:
            for rank in of_last:
                os.kill(job.pids[rank], number)

        def plug_last(state: str) -> None:
            hosts.run(last, "ip", "link", "set", "eth0", state)
            if state == "up":
                hosts.run(last, "ip", "route", "add", "default", "dev", "eth0")

        steps(job, exchange, 8, 3)
        hosts.blocked.add(last)
        threading.Timer(2.5, hosts.blocked.clear).start()
        steps(job, exchange, 8, 1)
        say(f"{exchange}, 2.5 s without frames: nobody is lost")
        block, unblock = hosts.blocked.add, hosts.blocked.clear
        break_and_repair(job, exchange, "partition", of_last, partial(block, last), unblock)
        first = range(each)
        break_and_repair(job, exchange, "partition of host 0", first, partial(block, 0), unblock)
        unplug, plug = partial(plug_last, "down"), partial(plug_last, "up")
        break_and_repair(job, exchange, "unplugged", of_last, unplug, plug)
        stop, go_on = (partial(signal_last, each) for each in (signal.SIGSTOP, signal.SIGCONT))
        break_and_repair(job, exchange, "stopped", of_last, stop, go_on)
        signal_last(signal.SIGKILL)
        lose(job, exchange, "killed", range(last * each), of_last)


def break_and_repair(
    job: RanksOnHosts,
    exchange: str,
    name: str,
    cut: range,
    do: Callable[[], object],
    undo: Callable[[], object],
) -> None:
    """Break something, hear of it on every rank, repair it, and reset all ranks."""
    do()
    stopped = cut if name == "stopped" else ()
    lose(job, exchange, name, [rank for rank in job.everybody if rank not in stopped], cut)
    job.tell(stopped, "steps", exchange, 8, 10**6)
    undo()
    assert all("lost" in answer for answer in job.answers(stopped))
    assert job.ask("reset", exchange) == [None] * job.world_size
    steps(job, exchange, 8, 3)


def lose(
    job: RanksOnHosts, exchange: str, name: str, heard: Iterable[int], cut: Iterable[int]
) -> None:
    """Take a step on the ranks that can; each ends in time, and names who is lost or the store."""
    job.tell(heard, "steps", exchange, 8, 10**6)
    for rank, answer in zip(heard, job.answers(heard), strict=True):
        after = f"rank {rank} after {answer['after']:.1f} s"
        say(f"{exchange}, {name}: {after}: {answer['lost']}")
        assert answer["after"] < TIMEOUT_S + PROMISED_S * slowness(), answer
        lost = set(job.everybody) - set(cut) if rank in cut else set(cut)
        known = set(answer["lost"]) == lost
        assert known or "the store of the process group on" in answer["text"], answer


def main() -> None:
    if said := obstacle():
        sys.exit(f"make hosts: not here: {said}")
    measure_slowness()
    starts = [("none", "10.77.0.1"), ("loopback", "node-0"), ("resolve", "node-0")]
    every: dict[str, list[Callable[[], None]]] = {
        "starts": [*(partial(start_by, *each) for each in starts), start_by_wrong_address],
        "exchanges": [exchanges],
        "faults": [
            *(partial(faults, exchange, 3, 1) for exchange in ("collective", "p2p")),
            partial(faults, "two_level", 2, 2),
        ],
    }
    named = sys.argv[1:] or every
    for beside in (("starts",), ("exchanges", "faults")):
        parts = [part for name in beside if name in named for part in every[name]]
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(part) for part in parts]:
                done.result()
    say("ok")


if __name__ == "__main__":
    main()
