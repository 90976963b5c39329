"""`vllm bench serve` against a vLLM server with the adapter and one without, in turn.

    python -m benchmarks.engines.bench --help

For each number of ranks both servers are started with the same options; the one that is not asked
waits idle. Greedy requests come first: both have to write the same texts before a time counts.
Rounds of vLLM's own benchmark follow, the servers in turn. Their requests draw at temperature 1
without seeds. With a seed, vLLM's own sampler ends its server on a CPU when the request is in the
middle of its prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import client
from benchmarks.engines.client import Client
from benchmarks.engines.environment import make_environment, make_model, versions
from benchmarks.engines.rounds import OF_VLLM, PARTS, TPSAMPLE, VIEWS, VLLM, notes, rows
from benchmarks.engines.server import NAME, Kind, Server, say
from benchmarks.engines.steps import Steps
from benchmarks.lab import machine
from benchmarks.lab.page import write_page
from benchmarks.lab.results import RESULT, Result

WORKERS = {TPSAMPLE: "Adapter", VLLM: "Own"}
"""Of `timed_workers`."""
OPTION = '{"tpsample": {"screening": "int8"}}'
"""Of --additional-config, with the adapter; all other options are the same."""
INPUT_TOKENS, OUTPUT_TOKENS, SPREAD = 64, 64, 0.5
"""Lengths are drawn between 1 - SPREAD and 1 + SPREAD times these."""
PAUSE_S = 1.5
"""Workers of vLLM spin for a second after their last request."""


class Void(RuntimeError):
    """The servers do not do the same work, so their times are not compared."""


@dataclass
class Bench:
    """The rounds of all numbers of ranks.

    Attributes:
        loads: numbers of requests that are sent at once.
        rounds: of one load and server: ranks, requests, server, the numbers of vLLM's result, and
            ms of LM head and sampler in a step of all requests.
        texts: by number of ranks, how many greedy texts were compared, all equal.
    """

    python: Path
    model: Path
    folder: Path
    loads: Sequence[int]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, int] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    _steps: dict[str, Steps] = field(default_factory=dict)
    _client: Client | None = None

    def measure(self, ranks: int, most_rounds: int, deadline: float) -> None:
        """Start both servers, compare their texts, and take rounds until the deadline."""
        with ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            command = [str(self.python), *client.COMMAND]
            self._client = stack.enter_context(Client(command, self.folder / "client.log"))
            servers = {
                name: stack.enter_context(
                    Server(
                        kind_of(name, ranks, max(self.loads)),
                        self.python,
                        self.model,
                        self.folder / f"{name}-{ranks}",
                    )
                )
                for name in WORKERS
            }
            for server in servers.values():
                server.wait_ready(deadline)
                say(f"{server.kind.name}: ready")
            self.commands = {name: shown(server) for name, server in servers.items()}
            # Greedy requests also warm the servers up.
            found = [
                self._ask(server, "greedy", self.loads[0], deadline, greedy=True)
                for server in servers.values()
            ]
            self._steps = {name: Steps(each.folder, ranks) for name, each in servers.items()}
            self.texts[ranks] = same_texts(*found)
            self._rounds(ranks, servers, most_rounds, deadline)

    def _rounds(
        self, ranks: int, servers: dict[str, Server], most_rounds: int, deadline: float
    ) -> None:
        """Take rounds, in which the servers change places, until one more would be too late."""
        took = 0.0
        for number in range(most_rounds):
            start = time.monotonic()
            order = list(servers) if number % 2 == 0 else list(servers)[::-1]
            late = start + took > deadline
            try:
                if not late:
                    self._round(ranks, {name: servers[name] for name in order}, number, deadline)
            except subprocess.TimeoutExpired:
                late = True
            if late:
                say(f"{ranks} ranks: no time is left for round {number + 1}")
                return
            took = time.monotonic() - start
            say(f"{ranks} ranks: round {number + 1} took {took:.0f} s")

    def _round(self, ranks: int, servers: dict[str, Server], number: int, deadline: float) -> None:
        """Ask the servers in turn with each load; a round that is not finished does not count."""
        done = []
        for load in self.loads:
            for name, server in servers.items():
                time.sleep(PAUSE_S)
                result = self._ask(server, f"{load}-{number}", load, deadline)
                measured = {key: result[key] for key in OF_VLLM}
                measured[PARTS] = self._steps[name].new(load)
                done.append({"ranks": ranks, "requests": load, "server": name, **measured})
        self.rounds += done

    def _ask(
        self, server: Server, name: str, load: int, deadline: float, *, greedy: bool = False
    ) -> dict[str, Any]:
        """Run `vllm bench serve` once, and return its result."""
        out = server.folder / f"bench-{name}.json"
        out.unlink(missing_ok=True)
        assert self._client is not None
        self._client.ask(bench_arguments(server, self.model, out, load, greedy=greedy), deadline)
        return read(out, load)


def kind_of(name: str, ranks: int, most: int) -> Kind:
    """Return how the server of a name is started, with room for so many requests at once.

    All prompts fit one step, so that steps of all requests come.
    """
    room = "--max-num-seqs", str(most), "--max-num-batched-tokens", str(2 * most * INPUT_TOKENS)
    option = ("--additional-config", OPTION) if name == TPSAMPLE else ()
    worker = f"benchmarks.engines.timed_workers.{WORKERS[name]}"
    title = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
    return Kind(title, ranks, worker=worker, arguments=(*room, *option))


def bench_arguments(
    server: Server, model: Path, out: Path, requests: int, *, greedy: bool
) -> list[str]:
    """Return the arguments that ask a server; the prompts are the same in every round."""
    return [
        *("--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", server.url.removesuffix("/v1")),
        *("--model", str(model), "--served-model-name", NAME, "--seed", "0"),
        *("--dataset-name", "random", "--random-range-ratio", str(SPREAD)),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(requests), "--request-rate", "inf", "--ignore-eos"),
        *("--temperature", "0" if greedy else "1", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"),
        *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
        *(("--save-detailed",) if greedy else ()),
    ]


def read(path: Path, requests: int) -> dict[str, Any]:
    """Return a result of `vllm bench serve`.

    Raises:
        Void: a request failed, or the result lacks a number.
    """
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("completed") != requests or result.get("failed"):
        raise Void(
            f"{path}: expected {requests} answered requests, got {result.get('completed')}, "
            f"{result.get('failed')} failed"
        )
    if missing := [key for key in OF_VLLM if key not in result]:
        raise Void(f"{path}: it has no {', '.join(missing)}")
    return result


def same_texts(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return how many texts two results have, which are the same.

    Raises:
        Void: they are not, or there is none.
    """
    texts, others = one["generated_texts"], other["generated_texts"]
    apart = sum(a != b for a, b in zip(texts, others, strict=True))
    if apart or not all(texts) or not texts:
        raise Void(f"{apart} of {len(texts)} greedy texts differ between the servers")
    return len(texts)


def shown(server: Server) -> str:
    """Return a server's command without folders and ports."""
    words = list(server.command)
    words[0], words[2] = "vllm", "MODEL"
    del words[words.index("--host") : words.index("--port") + 2]
    return " ".join(words)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the page; 1 if a number of ranks has no round."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=machine.ROOT / ".engines")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, one after the other")
    parser.add_argument("--requests", default="16,64", help="numbers of them, sent at once")
    parser.add_argument("--rounds", type=int, default=8, help="at most, of each server and load")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all but the installation")
    parser.add_argument("--output", type=Path, help="folder of the page; default in the cache")
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    counts, loads = (list(map(int, each.split(","))) for each in (options.ranks, options.requests))
    result = Result(
        benchmark="vllm_bench",
        question="What does the adapter cost or save a vLLM server? `vllm bench serve` asked two "
        "servers with the same options in turn, one of them with the adapter and "
        f"`--additional-config '{OPTION}'`. Both time their LM head and sampler.",
        machine=machine.describe(torch.device("cpu")),
        settings={"threads": os.environ.get("OMP_NUM_THREADS", "1")},
        views=[vars(view) for view in VIEWS],
    )
    cache.mkdir(parents=True, exist_ok=True)
    python = make_environment(cache)
    # A run that is told to stop ends its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    bench = Bench(python, make_model(cache), cache / "bench", loads)
    start = time.monotonic()
    with result.session(machine.command()):
        for number, ranks in enumerate(counts, 1):
            deadline = start + 60 * options.minutes * number / len(counts)
            try:
                bench.measure(ranks, options.rounds, deadline)
                if all(each["ranks"] != ranks for each in bench.rounds):
                    raise Void("no round ended in time")
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                why = " ".join(str(error).split())[:300]
                result.warnings.append(f"Not measured on {ranks} ranks: {why}")
                say(result.warnings[-1])
    result.settings |= {"versions": versions(python), **bench.commands}
    result.rows = rows(bench.rounds)
    result.notes = notes(bench.rounds, bench.texts)
    folder = options.output or cache / "bench-page"
    result.save(folder / RESULT)
    say(f"page: {write_page(folder)}")
    return 1 if result.warnings else 0


if __name__ == "__main__":
    sys.exit(main())
