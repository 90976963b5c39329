"""Bytes and packets on the wire per step, and the network's share of its time.

Every exchange stands beside both ways of moving logits. Hosts are network namespaces of this
machine, so it needs root. The counters are those of the hosts' interfaces: Ethernet, IP and TCP
headers, acknowledgements, and frames of 1500 bytes. They do not depend on how busy the machine is.
Times are of messages alone, without product or sampler, over cables of several rates and delays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab import baselines
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.hosts import Hosts, RanksOnHosts, obstacle
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from benchmarks.lab.results import Row, View, row, with_ratios
from benchmarks.lab.shapes import Shape
from benchmarks.lab.timing import Timing
from benchmarks.lab.whole_logits import KINDS
from tpsample import VocabShard
from tpsample.distributed import Job, join

STEPS = 10
EXCHANGES = ("collective", "two_level")
NETWORKS = ((1000, 0.1), (1000, 1.0), (100, 1.0), (100, 10.0))
"""Mbit/s of a host's cable, and ms from host to host."""


def serve(line: Connection, shape: Shape, batches: tuple[int, ...]) -> None:
    """Do on a rank what the driver says."""
    torch.set_num_threads(1)
    with join(timeout_s=300) as job:
        ways = Ways(job, shape, batches)
        line.send("ready")
        while True:
            name, arguments, _ = line.recv()
            line.send(getattr(ways, name)(*arguments))


class Ways:
    """A rank with tpsample's exchanges and the ways of moving logits."""

    def __init__(self, job: Job, shape: Shape, batches: tuple[int, ...]) -> None:
        self._job, weight = job, make_weight(shape.vocab_size, shape.hidden_size, job.device)
        shard = VocabShard.even(len(weight), job.rank, job.world_size)
        own = weight[shard.start : shard.stop]
        make = partial(make_sampler, own, max(batches), shard=shard)
        self._samplers = {name: make(exchange=name) for name in EXCHANGES}
        self._moves = {kind.name: kind(weight, job.rank, job.world_size) for kind in KINDS}
        self._problems = {rows: Problem.make(weight, rows) for rows in batches}

    def step(self, way: str, rows: int, count: int) -> int:
        """Take steps, the first one checked; return how many bytes of payload this rank sends."""
        problem = self._problems[rows]
        if way in self._samplers:
            candidate = problem.sampled_by(self._samplers[way])
            if count == 1:
                candidate.check()
            step: Callable[[], object] = candidate.step
            sent = self._samplers[way].exchange.bytes_sent(rows)
        else:
            move = self._moves[way]
            step = partial(move.tokens, problem.hidden_states, baselines.softmax_race)
            sent = move.bytes_sent(rows)
        for _ in range(count):
            step()
        return sent

    def time(self, rows: int, repeats: int, delay_s: float) -> dict[str, Timing]:
        """Return the times of the messages of a step alone, each way in turn."""

        def align() -> None:  # the hosts have one clock
            start = torch.tensor(time.monotonic() + 6 * delay_s + 0.01, dtype=torch.float64)
            dist.all_reduce(start, dist.ReduceOp.MAX)
            time.sleep(max(0.0, float(start) - time.monotonic()))

        def swap(exchange: Any) -> None:
            exchange.begin(rows)
            exchange.set_digest(1)
            exchange.publish(0, rows)
            exchange.collect(rows)

        def move(way: Any, local: torch.Tensor, ids: torch.Tensor) -> None:
            way.moved(local)
            way.told(ids, rows)

        steps: dict[str, Callable[[], object]] = {
            name: partial(swap, sampler.exchange) for name, sampler in self._samplers.items()
        }
        for name, way in self._moves.items():
            local = torch.zeros(rows, way.width, dtype=torch.bfloat16)
            steps[name] = partial(move, way, local, torch.zeros(len(way.own_rows(rows))).long())
        return Run(self._job, repeats=repeats).time(steps, align)


def rows(run: Run) -> Iterator[list[Row]]:
    """Yield the counts on two hosts, of one rank and of two each; then the times of two each."""
    if said := obstacle():
        run.note(f"Not here: {said}.")
        return
    run.note(
        "Hosts are network namespaces of one machine; logits are in bf16. Bytes and packets have "
        "headers, acknowledgements and the digest of the call, in frames of 1500 bytes. A rank's "
        "payload is 8 bytes per row and peer. `p2p` is `collective` on CPUs.",
        "Times are of two hosts of two ranks, and of messages alone: no product, no sampler. A "
        "heading names the rate and the one-way delay of a host's cable. A thread of Python is the "
        "switch, which adds some 0.1 ms. Its queues have no end, so no frame is lost. All ranks "
        "start a step at one time.",
    )
    shape = run.shapes[0]
    for each in (1, 2):
        with Hosts(2) as hosts:
            job = RanksOnHosts(hosts, each, serve, shape, run.batches)
            yield from _counts(run, hosts, job, f"2 hosts × {each}")
    with Hosts(2, whole_segments=True) as hosts:
        job = RanksOnHosts(hosts, 2, serve, shape, run.batches)
        for mbit, delay_ms in NETWORKS:
            hosts.bits_per_s, hosts.delay_s = mbit * 1e6, delay_ms / 1e3
            for batch in run.batches:
                times = job.ask("time", batch, run.repeats, hosts.delay_s)[0]
                point = {"shape": shape.name, "mode": f"{mbit} Mbit/s, {delay_ms:g} ms"}
                yield with_ratios(
                    [row(way, _kind(way), times[way], **point, batch=batch) for way in times]
                )


def _counts(run: Run, hosts: Hosts, job: RanksOnHosts, name: str) -> Iterator[list[Row]]:
    """Yield the bytes and packets that all interfaces sent per step, by way and batch."""
    for batch in run.batches:
        for way in (*EXCHANGES, *(kind.name for kind in KINDS)):
            job.ask("step", way, batch, 1)
            time.sleep(0.3)  # the last acknowledgements
            before = hosts.sent()
            payload = max(job.ask("step", way, batch, STEPS))
            time.sleep(0.3)
            wire = [(b - a) / STEPS for a, b in zip(before, hosts.sent(), strict=True)]
            counted = {"payload_bytes": payload, "wire_bytes": wire[0], "packets": wire[1]}
            point = {"shape": name, "batch": batch}
            yield [{**point, "candidate": way, "kind": _kind(way), **counted}]


def _kind(way: str) -> str:
    return "tpsample" if way in EXCHANGES else "baseline"


BENCHMARK = Benchmark(
    "wire",
    "How many bytes and packets do all hosts send per step, and how long does the network take?",
    [
        View("wire", "Bytes on the wire per step, all hosts", x="batch", y="wire_bytes"),
        View("", "Packets per step, all hosts", x="batch", y="packets"),
        View("", "Payload of a rank, bytes", x="batch", y="payload_bytes"),
        View("network", "The network's share of a step", x="batch", panel="mode"),
    ],
    rows,
    by_default=False,
)
