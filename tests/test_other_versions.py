"""The suites that touch torch's and Triton's own interfaces, with the versions of GPU machines.

PyPI's torch may be a CUDA build of half a gigabyte, which runs on a CPU with stand-ins for CUDA's
libraries (`tests.support.cuda_stubs`). vLLM's build for CPUs comes with Triton 3.9.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import cuda_stubs
from tests.support.commands import ROOT, run_command
from tests.support.older import NO_NETWORK

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
VERSIONS = (("2.10.0", "3.6.0"), ("2.11.0", "3.6.0"), ("2.13.0", "3.9.0"))
"""Pairs of torch and Triton."""
NEEDS = (
    "numpy<2.4",
    *("sympy", "networkx", "jinja2", "filelock", "fsspec", "typing_extensions", "setuptools"),
    *("pytest", "pytest-timeout", "pytest-xdist", "scipy", "typer", "rich"),
    *("numba", "mpi4py", "openmpi"),
)
SUITES = (
    *("tests/exchange", "tests/local", "tests/ranks", "tests/gpu", "tests/test_compiled.py"),
    *("tests/test_interpreter.py", "tests/test_distributed.py", "tests/kernels/test_kernels.py"),
    *("tests/kernels/test_control_kernels.py", "tests/kernels/test_step_launches.py"),
    *("tests/sampler/test_from_logits.py", "tests/sampler/test_other_samplers.py"),
    *("tests/sampler/test_warm_up.py", "tests/sampler/test_fuzz.py"),
)


def _environment(folder: Path, torch: str, triton: str) -> Path:
    """Make an environment with these versions, and return its Python."""
    assert run_command(sys.executable, "-m", "venv", folder, timeout_s=120).returncode == 0
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    for words in (("--no-deps", f"torch=={torch}"), (f"triton=={triton}", *NEEDS)):
        tools = ("-c", "constraints/tools.txt")
        done = run_command(*pip, *tools, *words, timeout_s=1200)
        if any(reason in done.stderr for reason in NO_NETWORK):
            pytest.skip("needs a network, to install another torch")
        assert done.returncode == 0, done.stderr[-2000:]
    cuda_stubs.make(folder)
    return python


@pytest.mark.parametrize(("torch", "triton"), VERSIONS)
def test_the_suites_pass_with_other_versions(torch, triton, tmp_path):
    python = _environment(tmp_path / "env", torch, triton)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", 2, *SUITES)
    done = run_command(python, *words, env={"PYTHONPATH": str(ROOT)}, timeout_s=3600)
    assert done.returncode == 0, done.stdout[-4000:]
