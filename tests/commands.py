"""Runs commands the way a user would; nothing outlives the call, whatever it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    "--nproc-per-node",
)
MPIRUN = (
    *(str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-np"),
)


def run_command(
    *command: object, timeout_s: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in the root of the project, one thread per process, without Triton's interpreter.

    Args:
        timeout_s: then everything is killed and subprocess.TimeoutExpired is raised.
        env: variables to set on top.
    """
    variables = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
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
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
