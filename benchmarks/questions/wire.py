"""Bytes and packets on the wire per step, of every exchange and of both ways of moving logits.

Hosts are network namespaces of this machine, so it needs root. The counters are those of the hosts'
interfaces: Ethernet, IP and TCP headers, acknowledgements, and frames of 1500 bytes. They do not
depend on how busy the machine is, so no time is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.lab import baselines
from benchmarks.lab.harness import Benchmark, Run
from benchmarks.lab.hosts import Hosts, obstacle
from benchmarks.lab.problem import Problem, make_sampler, make_weight
from benchmarks.lab.results import Row, View
from benchmarks.lab.whole_logits import KINDS
from tpsample import VocabShard
from tpsample.distributed import join

SHAPE, BATCHES, STEPS = (49152, 576), (1, 8, 64), 10
EXCHANGES = ("collective", "two_level")
WAYS = (*EXCHANGES, *(kind.name for kind in KINDS))


def rank() -> None:
    """Take the steps that the driver names, and say how many bytes of payload a rank sends."""
    torch.set_num_threads(1)
    with join(timeout_s=300) as job:
        weight = make_weight(*SHAPE, job.device)
        shard = VocabShard.even(SHAPE[0], job.rank, job.world_size)
        own = weight[shard.start : shard.stop]
        samplers = {name: make_sampler(own, 64, shard=shard, exchange=name) for name in EXCHANGES}
        problems = {rows: Problem.make(weight, rows) for rows in BATCHES}
        print("ready", flush=True)
        for line in sys.stdin:
            way, rows, count = json.loads(line)
            if way in samplers:
                candidate = problems[rows].sampled_by(samplers[way])
                if count == 1:
                    candidate.check()
                step: Any = candidate.step
                sent = samplers[way].exchange.bytes_sent(rows)
            else:
                kind = next(kind for kind in KINDS if kind.name == way)
                moved = kind(weight, job.rank, job.world_size)
                hidden = problems[rows].hidden_states
                step = partial(moved.tokens, hidden, baselines.softmax_race)
                sent = moved.bytes_sent(rows)
            for _ in range(count):
                step()
            print(f"sent {sent}", flush=True)


def tell(ranks: list[subprocess.Popen[str]], *command: Any) -> int:
    """Let all ranks take steps; return the largest payload."""
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
    return max(int(wait_for(process, "sent ").split()[1]) for process in ranks)


def wait_for(process: subprocess.Popen[str], begin: str) -> str:
    """Return the next line that begins so."""
    said = []
    for line in process.stdout or ():
        if line.startswith(begin):
            return line
        said.append(line)
    raise RuntimeError("a rank has ended: " + "".join(said[-20:]))


def measure(hosts_count: int, ranks_each: int) -> Iterator[Row]:
    """Yield the bytes and packets that all interfaces sent per step, by way and batch."""
    world_size = hosts_count * ranks_each
    with Hosts(hosts_count) as hosts:
        ranks = []
        for number in range(world_size):
            env = {
                "RANK": number, "WORLD_SIZE": world_size,
                "LOCAL_RANK": number % ranks_each, "LOCAL_WORLD_SIZE": ranks_each,
                "MASTER_ADDR": hosts.address(0), "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            texts = {name: str(value) for name, value in env.items()}
            command = (sys.executable, "-m", "benchmarks.questions.wire")
            ranks.append(hosts.start(number // ranks_each, *command, **texts))
        for process in ranks:
            wait_for(process, "ready")
        for rows in BATCHES:
            for way in WAYS:
                tell(ranks, way, rows, 1)
                time.sleep(0.3)  # the last acknowledgements
                before = hosts.sent()
                payload = tell(ranks, way, rows, STEPS)
                time.sleep(0.3)
                wire = [(b - a) / STEPS for a, b in zip(before, hosts.sent(), strict=True)]
                yield {
                    "shape": f"{hosts_count} hosts × {ranks_each}",
                    "batch": rows,
                    "candidate": way,
                    "kind": "tpsample" if way in EXCHANGES else "baseline",
                    "payload_bytes": payload,
                    "wire_bytes": wire[0],
                    "packets": wire[1],
                }


def rows(run: Run) -> Iterator[Row]:
    """Yield the counts on two hosts, of one rank and of two each."""
    if said := obstacle():
        run.note(f"Not here: {said}.")
        return
    run.note(
        f"V = {SHAPE[0]}, D = {SHAPE[1]}, logits in bf16: with headers, acknowledgements and the "
        "digest of the call. Hosts are network namespaces of one machine, frames have 1500 bytes. "
        "`p2p` is `collective` on CPUs. A rank's payload is 8 bytes per row and peer.",
    )
    for ranks_each in (1, 2):
        yield from measure(2, ranks_each)


BENCHMARK = Benchmark(
    "wire",
    "How many bytes and packets do the interfaces of all hosts send per step?",
    [
        View("wire", "Bytes on the wire per step, all hosts", x="batch", y="wire_bytes"),
        View("", "Packets per step, all hosts", x="batch", y="packets"),
        View("", "Payload of a rank, bytes", x="batch", y="payload_bytes"),
    ],
    rows,
    by_default=False,
)

if __name__ == "__main__":
    rank()
