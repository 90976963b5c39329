"""`vllm bench serve`, again and again in one process of vLLM's Python, which takes 10 s to load.

    PYTHON -m benchmarks.engines.client

reads a list of arguments a line, as JSON, and writes a line when vLLM has written the result.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.server import client_variables
from benchmarks.lab.machine import ROOT
from benchmarks.lab.orphans import with_parent

COMMAND = ("-m", "benchmarks.engines.client")


class Client:
    """The process, for as long as a `with` block lasts; its output goes to a file."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Client:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(self._command),
                cwd=ROOT,
                env=client_variables(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def ask(self, arguments: list[str], deadline: float) -> None:
        """Run the benchmark once.

        Raises:
            subprocess.TimeoutExpired: it was not over at the deadline.
            RuntimeError: the process ended.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        left = max(1.0, deadline - time.monotonic())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(arguments)}\n".encode())
            process.stdin.flush()
        if not select.select([process.stdout], [], [], left)[0]:
            raise subprocess.TimeoutExpired(self._command, left)
        if not process.stdout.readline():
            raise RuntimeError(f"`vllm bench serve` ended:\n{self._log.read_text()[-3000:]}")


def main() -> None:
    """Run the benchmark for each line of standard input."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            serve(parser.parse_args(json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    main()
