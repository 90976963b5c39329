"""Runs commands the way a user would; nothing outlives the call, whatever it started.

A command and what it starts are one process group, which is killed as a whole at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import slowness

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    "--nproc-per-node",
)
MPIRUN = (
    *(str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-np"),
)
GENERATE = ("-m", "tpsample.cli", "generate")


def starter(launcher: str) -> tuple[object, ...]:
    """Return what starts two ranks of a script, by torchrun or mpi4py; skip a test without it."""
    if launcher == "torchrun":
        return (*TORCHRUN, 2)
    need_mpirun()
    return (*MPIRUN, 2, sys.executable, "-m", "mpi4py")


def need_mpirun() -> None:
    """Skip a test where there is no launcher of MPI beside this Python."""
    if not (BIN / "mpirun").exists():
        pytest.skip("needs mpirun, of the extra mpi")


NOT_HANDED_ON = {"TRITON_INTERPRET", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
"""Variables that `make test` and the tests set for themselves, and that no command inherits."""


def run_command(
    *command: object, timeout_s: float = 240, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in the root of the project, one thread per process, without Triton's interpreter.

    Args:
        timeout_s: times `slowness()`, then subprocess.TimeoutExpired is raised.
        env: variables to set on top.
    """
    variables = {
        **{name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_osc": "^ucx",
        "TERM": "dumb",
        "COLUMNS": "200",
        **(env or {}),
    }
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s * slowness())
    finally:
        # Whatever ended the wait; grandchildren may live on where the child has ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def lives(process: int) -> bool:
    """Whether a process runs: one that has ended stays in the list until its parent looks."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] != "Z"
    return False


def wait_for(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds, for so many seconds times `slowness()`."""
    deadline = time.monotonic() + seconds * slowness()
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def invoke(*words: object) -> Any:
    """Run `tpsample` with these words in this process: one rank, and no import to wait for."""
    from typer.testing import CliRunner  # the tests on a GPU do without typer

    from tpsample.cli.app import app

    variables = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(word) for word in words], env=variables)


def texts(stdout: str) -> str:
    """The part of the output of `generate` between the progress bars and the table."""
    found = re.search(r"checking tokens .*?\n(.*?)\n model ", stdout, re.DOTALL)
    assert found, stdout
    return found[1]
