"""`vllm serve` on loopback, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.machine import ROOT
from benchmarks.lab.orphans import with_parent
from benchmarks.lab.started_ranks import free_port

NAME = "smol"
"""The model's name in requests."""


@dataclass(frozen=True)
class Kind:
    """How a server is started.

    Attributes:
        name: of its folder, and on the page.
        worker: class of its workers; None is vLLM's own choice.
        arguments: of `vllm serve`, beside those of every server; {model} is the model's folder.
        variables: of its environment, beside those of every server.
    """

    name: str
    world_size: int
    worker: str | None = None
    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


class Server:
    """A server, and the folder of its log and of the files of its workers.

    Attributes:
        url: of its OpenAI interface.
        command: that starts it.
        inside: before a command, lets it reach the server.
        ready_s: how long it took to start.
    """

    def __init__(self, kind: Kind, python: Path, model: Path, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("rank-*"), *folder.glob("steps-*")):
            old.unlink()
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self.ready_s = 0.0
        self.command = [
            *(str(python.with_name("vllm")), "serve", str(model), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32"),
            *("--tensor-parallel-size", str(kind.world_size), "--max-model-len", "512"),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.1"),
            *(("--worker-cls", kind.worker) if kind.worker else ()),
            *(each.replace("{model}", str(model)) for each in kind.arguments),
        ]
        self._environment = {**os.environ, **variables(kind, folder)}
        self._process: subprocess.Popen[Any] | None = None
        self.inside: list[str] = []

    def __enter__(self) -> Server:
        """Start it. All its processes are in its session, which is killed at the end.

        It ends with this process, too, and vLLM's workers end with their server.
        """
        log = (self.folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            with_parent(self.command),
            cwd=ROOT,
            env=self._environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for seen in self.seen():
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen["pid"], signal.SIGKILL)
        self._process.wait()

    def wait_ready(self, deadline: float) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended, or the time is over; with the end of its log.
        """
        start = time.monotonic()
        while not self._answers():
            if self.ended() is not None or time.monotonic() > deadline:
                why = "ended" if self.ended() is not None else "was not ready in time"
                raise RuntimeError(f"{self.kind.name}: the server {why}:\n{self.log()[-3000:]}")
            time.sleep(0.5)
        self.ready_s = time.monotonic() - start

    def ended(self) -> int | None:
        """Return its exit code, None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait_ended(self, timeout_s: float) -> int | None:
        """Return its exit code, None if it still runs after so long."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def log(self) -> str:
        """Return its output."""
        return (self.folder / "server.log").read_text(errors="replace")

    def seen(self) -> list[dict[str, Any]]:
        """Return the records of watched workers, in the order of ranks."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*.json"))]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def variables(kind: Kind, folder: Path) -> dict[str, str]:
    """Return the variables of a server on a small CPU machine, which asks nobody outside it."""
    return {
        "TPSAMPLE_WATCH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **dict(kind.variables),
    }


def client_variables() -> dict[str, str]:
    """Return the variables of the processes that ask."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def say(line: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
