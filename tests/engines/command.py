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
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.environment import make_environment, make_model, versions
from benchmarks.engines.server import Kind, Server, client_variables, say
from benchmarks.lab import machine
from benchmarks.lab.machine import ROOT
from tests.engines import page
from tests.engines.asked import LATER_VLLM
from tests.engines.comparison import (
    CHANGED,
    CHANGES,
    DETERMINISTIC,
    DRAFTING,
    EAGLE_TP2,
    ENGINES,
    HF,
    LATER,
    PARTS,
    PLAIN,
    PLUG_IN_TP2,
    V1_COUNTS,
    V1_HOSTS,
    V1_LATER,
    V1_TP2,
    V2_TP2,
    compare,
    sampled_by,
    texts,
)
from tests.engines.environment import make_sglang
from tests.engines.lora import make_adapter
from tests.engines.on_hosts import ServerOnHosts
from tests.engines.verdicts import (
    Verdict,
    lost,
    refused_by_the_first_step,
    told_of_a_later_version,
    told_of_determinism,
    told_of_the_first_step,
    told_of_the_sampler,
)

NAMES = tuple(
    name for kind in PARTS for name in ((kind.name, *ENGINES) if kind is PLAIN else (kind.name,))
)
"""The parts, in the order in which they run."""
START_S = 600.0
"""The longest start of a server."""
Part = dict[str, Any]
"""The record of a part: `answers`, and of a server also `seen`, `server` and `ended`."""


@dataclass
class Run:
    """The parts that are done, and how long is left.

    Attributes:
        deadline: on the monotonic clock; a part that would start behind it is not run. The start of
            a server does not count, because it says more about the machine than about us.
        parts: by name; `main` keeps them in a file.
    """

    python: Path
    model: Path
    cache: Path
    deadline: float
    parts: dict[str, Part] = field(default_factory=dict)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    def answers(self) -> dict[str, dict[str, Any]]:
        """Return the answers of every part that is done."""
        return {name: part["answers"] for name, part in self.parts.items()}

    def take(self, name: str) -> Part:
        """Run a part, and return its record."""
        if name in ENGINES:
            return self.engine(name)
        (kind,) = (kind for kind in PARTS if kind.name == name)
        if kind is EAGLE_TP2:
            self._beside(name, sys.executable, "eagle")
        return self.refuse(kind) if kind is V1_COUNTS else self.serve(kind)

    def serve(self, kind: Kind) -> Part:
        """Start a server, ask it its parts, and end it, some of them by killing a worker."""
        folder = self.cache / "runs" / slug(kind.name)
        its = ServerOnHosts if kind is V1_HOSTS else Server
        with its(kind, self.python, self.model, folder) as server:
            server.wait_ready(time.monotonic() + START_S)
            self.deadline += server.ready_s
            say(f"{kind.name}: ready after {server.ready_s:.0f} s")
            part: Part = {
                "server": {
                    "name": kind.name,
                    "runner": 2 if kind.variables else 1,
                    "ranks": kind.world_size,
                    "tokens_of": sampled_by(kind),
                    "ready_s": server.ready_s,
                },
                "answers": self._ask(server, PARTS[kind]),
            }
            if kind in DRAFTING:
                part["answers"]["counts"] = {
                    "drafted": count(server, "vllm:spec_decode_num_draft_tokens_total"),
                    "accepted": count(server, "vllm:spec_decode_num_accepted_tokens_total"),
                }
            part["seen"] = server.seen()
            ended = self._kill_worker(server) if kind in (V1_TP2, V2_TP2) else []
            if kind is V1_LATER:
                ended.append(told_of_a_later_version(kind.name, server.log(), LATER_VLLM))
            if kind is PLUG_IN_TP2:
                ended.append(told_of_the_sampler(server.log()))
            if sampled_by(kind) == "tpsample":
                told = told_of_the_first_step(kind.name, server.log(), kind.world_size)
                ended.append(told)
            part["ended"] = [vars(verdict) for verdict in ended]
        say(f"{kind.name}: asked")
        return part

    def refuse(self, kind: Kind) -> Part:
        """Start a server that is not to serve, and see that it ends and says why."""
        folder = self.cache / "runs" / slug(kind.name)
        with Server(kind, self.python, self.model, folder) as server:
            with contextlib.suppress(RuntimeError):
                server.wait_ready(time.monotonic() + START_S)
            ended = server.wait_ended(5.0) is not None
            found = refused_by_the_first_step(kind.name, server.log(), ended=ended)
        return {"answers": {}, "ended": [vars(found)]}

    def _ask(self, server: Server, parts: tuple[str, ...]) -> dict[str, Any]:
        out = server.folder / "answers.json"
        subprocess.run(
            self._client(server, out, parts),
            check=True,
            timeout=max(1.0, self.left_s()),
            env=client_variables(),
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def _client(self, server: Server, out: Path, parts: tuple[str, ...]) -> list[str]:
        module = "tests.engines.client"
        return [*server.inside, str(self.python), "-m", module, server.url, str(out), *parts]

    def _kill_worker(self, server: Server) -> list[Verdict]:
        """Kill rank 1 in the middle of a stream, and see what becomes of the server."""
        out = server.folder / "lost.json"
        out.unlink(missing_ok=True)
        client = subprocess.Popen(self._client(server, out, ("lost",)), env=client_variables())
        steps = server.seen()[0]["steps"]
        while server.seen()[0]["steps"] < steps + 5 and self.left_s() > 0:
            if server.ended() is not None:
                client.kill()
                return [Verdict("a killed worker ends the server", False, "it had ended before")]
            time.sleep(0.2)
        os.kill(server.seen()[1]["pid"], signal.SIGKILL)
        start = time.monotonic()
        code = server.wait_ended(min(90.0, max(1.0, self.left_s())))
        took = time.monotonic() - start
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(30)
        client.kill()
        stream = json.loads(out.read_text())["lost"]["stream"] if out.exists() else {}
        return lost(server.log(), code, took, stream)

    def engine(self, name: str) -> Part:
        """Ask another engine, in a process of its own, what the first server was asked."""
        out, ranks = self.cache / "runs" / f"{slug(name)}.json", ENGINES[name]
        python, module, own = sys.executable, "huggingface", dict[str, str]()
        if name != HF:
            python, module, own = str(make_sglang(self.cache)), "sglang", sglang_variables(ranks)
            own["TPSAMPLE_SGLANG"] = CHANGES.get(name, "")
        out.unlink(missing_ok=True)
        with contextlib.suppress(*((RuntimeError,) if name == CHANGED else ())):
            self._beside(name, python, module, str(out), str(ranks), **own)
        log = out.with_suffix(".log").read_text(errors="replace")
        if name == CHANGED:
            refused = refused_by_the_first_step(name, log, ended=not out.exists())
            return {"answers": {}, "ended": [vars(refused)]}
        found: dict[str, Any] = json.loads(out.read_text())
        ended = [told_of_the_first_step(name, log, ranks)] * (name != HF)
        if name == LATER:
            ended.append(told_of_a_later_version(name, log, "0.6.0"))
        if name == DETERMINISTIC:
            ended.append(told_of_determinism(name, log, found))
        return {"answers": found, "ended": [vars(verdict) for verdict in ended]}

    def _beside(self, name: str, python: str, module: str, *words: str, **own: str) -> None:
        """Run a module with the model and the first server's answers, in a process of its own."""
        folder = self.cache / "runs"
        asked = folder / "kinds.json"
        asked.write_text(json.dumps(self.parts[V1_TP2.name]["answers"]))
        with (folder / f"{slug(name)}.log").open("wb") as log:
            process = subprocess.Popen(
                [python, "-m", f"tests.engines.{module}", str(self.model), str(asked), *words],
                env={**client_variables(), **own},
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


def sglang_variables(ranks: int) -> dict[str, str]:
    """Return the variables of SGLang on a CPU.

    It takes as many ranks as the machine has NUMA nodes, unless each rank is told its cores.
    """
    on_cpu = ROOT / "tests" / "engines" / "sglang_on_cpu"
    found = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{on_cpu}{os.pathsep}{ROOT}"}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        of_rank = [str(cores[rank % len(cores)]) for rank in range(ranks)]
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(of_rank)
    return found


def count(server: Server, name: str) -> float:
    """Return one of the counters that vLLM shows on /metrics, summed over its engines."""
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics", timeout=30) as answer:
        return summed(answer.read().decode(), name)


def summed(metrics: str, name: str) -> float:
    """Return the sum of a counter in the text form of Prometheus."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.split()[-1]) for line in lines)


def slug(name: str) -> str:
    """Return the name of a part as one word, for `--only` and for folders."""
    return name.replace(", ", "-").replace(" ", "-")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are not done, and write the page.

    Returns:
        0 if everything held, 1 if something did not, 3 if something was not run and all else held.
    """
    parser = argparse.ArgumentParser(prog="engines", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".engines")
    limit = "for all but the installation and the starts of servers"
    parser.add_argument("--minutes", type=float, default=40.0, help=limit)
    parser.add_argument("--output", type=Path, help="folder of the page; default in the cache")
    names = {slug(name): name for name in NAMES}
    again = "run these again, and no others; default: what the last run of this commit left"
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=again)
    options = parser.parse_args(arguments)
    cache = options.cache.resolve()
    (cache / "runs").mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"machine": machine.describe(torch.device("cpu"))}
    record = cache / "runs" / "record.json"
    say("vLLM's environment: 3.5 GB and some minutes the first time")
    python = make_environment(cache)
    # A run that is told to stop ends its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    start = time.monotonic()
    deadline, done = start + 60 * options.minutes, kept(record, about["machine"])
    model = make_model(cache)
    make_adapter(model)
    run = Run(python, model, cache, deadline, done)
    todo = [names[each] for each in options.only or ()]
    todo = todo or [name for name in NAMES if name not in run.parts]
    if not todo:
        run.parts, todo = {}, list(NAMES)
    for name in todo:
        run.parts.pop(name, None)
    for name in sorted(todo, key=NAMES.index):
        if run.left_s() < 60:
            say(f"{name}: no time is left; the same command goes on from here")
        elif name in (*ENGINES, EAGLE_TP2.name) and V1_TP2.name not in run.parts:
            say(f"{name}: it is asked what {V1_TP2.name} was asked; run that first")
        else:
            try:
                run.parts[name] = run.take(name)
                record.with_suffix(".new").write_text(
                    json.dumps({"commit": about["machine"]["commit"], "parts": run.parts})
                )
                record.with_suffix(".new").rename(record)
            except (RuntimeError, subprocess.SubprocessError) as error:
                say(str(error))
    seen = {name: part["seen"] for name, part in run.parts.items() if "seen" in part}
    ended = [Verdict(**each) for part in run.parts.values() for each in part.get("ended", ())]
    found = compare(run.answers(), seen) + ended
    about |= {
        "servers": [part["server"] for part in run.parts.values() if "server" in part],
        "texts": texts(run.answers()),
        "minutes": (time.monotonic() - start) / 60,
        "limit_minutes": options.minutes,
        "versions": versions(python),
    }
    page.write(options.output or cache / "page", found, about)
    for verdict in found:
        say(f"{page.WORDS[verdict.held]:8} {verdict.what}: {verdict.found[:200]}")
    say(f"page: {options.output or cache / 'page'}")
    count = Counter(verdict.held for verdict in found)
    say(f"{count[True]} held, {count[False]} failed, {count[None]} not run")
    if count[None] and not count[False]:
        say("nothing failed; the same command runs the rest, though make calls this an error")
    return 1 if count[False] else 3 if count[None] else 0


def kept(path: Path, about: dict[str, Any]) -> dict[str, Part]:
    """Return the parts that a run of this commit has left in a file.

    Args:
        about: the machine. With uncommitted changes nobody knows which code the parts ran.
    """
    if about["uncommitted_changes"] or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found["parts"] if found["commit"] == about["commit"] else {}
