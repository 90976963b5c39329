"""The suites that touch torch's and Triton's own interfaces, with the versions of GPU machines.

PyPI's torch may be a CUDA build of half a gigabyte, which runs on a CPU with stand-ins for CUDA's
libraries (`tests.support.cuda_stubs`). vLLM's build for CPUs comes with Triton 3.9, and vLLM 0.33
takes torch 2.14.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import cuda_stubs
from tests.support.commands import ROOT, run_command
from tests.support.older import NO_NETWORK, interpreter_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
MACHINE = ROOT / "constraints" / "torch211.txt"
BESIDE = ("huggingface-hub", "accelerate", "safetensors", "matplotlib")
"""Packages of such a machine beside torch, Triton and `NEEDS`."""
VERSIONS = (
    *(("2.10.0", "3.6.0"), ("2.11.0", "3.6.0"), ("2.13.0", "3.9.0")),
    *(("2.14.1", "3.8.0"), ("2.15.0", "3.9.0")),
)
"""Pairs of torch and Triton."""
NEEDS = (
    "numpy",
    *("sympy", "networkx", "jinja2", "filelock", "fsspec", "typing_extensions", "setuptools"),
    *("pytest", "pytest-timeout", "pytest-xdist", "scipy", "typer", "rich"),
    *("numba", "mpi4py", "openmpi"),
)
SUITES = (
    *("tests/exchange", "tests/ranks", "tests/gpu", "tests/test_compiled.py"),
    *("tests/test_interpreter.py", "tests/test_distributed.py"),
    *("tests/backends/numba_/test_launch.py", "tests/backends/test_passes.py"),
    *("tests/backends/test_cuts.py", "tests/backends/triton_/test_kernels.py"),
    *("tests/backends/triton_/test_tiles.py", "tests/backends/triton_/test_control_kernels.py"),
    "tests/backends/triton_/test_step_launches.py",
    *("tests/sampler/test_from_logits.py", "tests/sampler/test_other_samplers.py"),
    *("tests/sampler/test_warm_up.py", "tests/fuzz/test_fuzz.py"),
)


PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-rfEs", "-n", 2)
COMPILED = ("tests.compiled", "--arch", 80, 90, "--only", "few_goldens", "one_push")
"""Steps through the compiled kernels of that Triton; 3.9 uses tensor memory of sm_100 too early."""


def _environment(folder: Path, interpreter: str, torch: str, *packages: str) -> Path:
    """Make an environment with this torch and these packages, and return its Python."""
    assert run_command(interpreter, "-m", "venv", folder, timeout_s=120).returncode == 0
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    for words in (("--no-deps", f"torch=={torch}"), packages):
        done = run_command(*pip, *words, timeout_s=1200)
        if any(reason in done.stderr for reason in NO_NETWORK):
            pytest.skip("needs a network, to install another torch")
        assert done.returncode == 0, done.stderr[-2000:]
    cuda_stubs.make(folder)
    return python


def _run(python: Path, *words: object) -> str:
    """Return what a module printed in an environment, after it ended well."""
    (libraries,) = python.parents[1].glob("lib/python3*/site-packages/torch/lib")
    env = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(libraries)}
    done = run_command(python, "-m", *words, env=env, timeout_s=5000)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(("torch", "triton"), VERSIONS)
def test_the_suites_pass_with_other_versions(torch, triton, tmp_path):
    needs = ("-c", "constraints/tools.txt", f"triton=={triton}", *NEEDS)
    python = _environment(tmp_path / "env", sys.executable, torch, *needs)
    _run(python, *PYTEST, *SUITES)
    _run(python, *COMPILED)


def test_all_passes_on_a_machine_that_comes_with_pytorch(tmp_path):
    """Nothing of tpsample is installed there, and no launcher of MPI."""
    interpreter = interpreter_of((3, 12))
    if interpreter is None:
        pytest.skip("needs Python 3.12, on the path or of pyenv")
    own = set(re.findall(r"^(\w+)==", MACHINE.read_text(), re.MULTILINE)) - {"torch"}
    needs = ("-c", str(MACHINE), *own, *(each for each in NEEDS if each != "openmpi"))
    python = _environment(tmp_path / "env", interpreter, "2.11.0", *needs, *BESIDE)
    print(_run(python, *PYTEST))
