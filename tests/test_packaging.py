"""The packages work where they are installed: the wheel alone, the sdist with its own tests.

The dear tests build both, and install them in environments of their own: several gigabytes for each
version of Python, because PyTorch has CPU builds on the index for few of them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = (3, 10)
CLAIMED = [
    tuple(map(int, found[1].split(".")))
    for line in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]
OTHERS = [version for version in CLAIMED if version != sys.version_info[:2]]
"""Versions that this environment is not of."""
OWN_TESTS = (
    "tests/test_noise_vectors.py",
    "tests/test_interface.py",
    "tests/sampler/test_golden.py",
)
PROGRAM = """
import sys, torch, tpsample
assert "site-packages" in tpsample.__file__, tpsample.__file__
assert not {"triton", "transformers", "typer"} & set(sys.modules)
weight, hidden = torch.randn(50, 8), torch.randn(3, 8)
with tpsample.LMHeadSampler(weight) as sampler:
    params = [tpsample.SamplingParams(top_p=0.8, seed=seed) for seed in range(3)]
    batch = tpsample.SamplingBatch.from_params(params, vocab_size=50)
    found = sampler(hidden, batch, 3).token_ids
logits = tpsample.reference.logits(hidden, weight)
assert torch.equal(found, tpsample.reference.sample(logits, batch, 3).token_ids)
"""


def _run(*command: object, cwd: Path) -> str:
    """Run a command without this checkout on its path, and return what it printed.

    Of the environment pip's own variables are handed on, such as where wheels lie.
    """
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**pip, "PATH": f"{Path(str(command[0])).parent}:/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _interpreter(version: tuple[int, int]) -> str | None:
    """Return a Python of a version that runs: on the path, or among those of pyenv."""
    name = ".".join(map(str, version))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{name}"), *sorted(pyenv.glob(f"{name}.*/bin/python"))]
    for each in found:
        # The shims of pyenv do not run where another version is chosen.
        if each and subprocess.run([each, "--version"], capture_output=True).returncode == 0:
            return str(each)
    return None


def test_the_versions_that_are_claimed_are_those_that_are_tried() -> None:
    assert PROJECT["project"]["requires-python"] == f">={'.'.join(map(str, OLDEST))}"
    assert CLAIMED[0] == OLDEST
    assert [(3, minor) for minor in range(OLDEST[1], CLAIMED[-1][1] + 1)] == CLAIMED


def test_every_source_is_python_of_the_oldest_version() -> None:
    for folder in ("tpsample", "benchmarks", "tests", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            ast.parse(path.read_text(), str(path), feature_version=OLDEST)


def test_the_sdist_has_what_its_makefile_and_its_readmes_name() -> None:
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    makefile = (ROOT / "Makefile").read_text()
    for name in ("tests", "benchmarks", "launch", "constraints"):
        assert name in included and name in makefile
    assert {"tpsample", "Makefile", "CHANGELOG.md"} <= included
    assert [name for name in included if not (ROOT / name).exists()] == []


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.27", cwd=folder)
    _run(python, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


def _install(interpreter: str, folder: Path, *what: str) -> Path:
    """An environment of an interpreter with the pinned torch; its python."""
    subprocess.run([interpreter, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    constraints = ROOT / "constraints" / "default.txt"
    _run(python, "-m", "pip", "install", "--quiet", "-c", constraints, *what, cwd=folder)
    return python


@pytest.mark.long
def test_the_wheel_works_in_a_bare_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = _install(sys.executable, tmp_path, str(wheel))
    _run(python, "-c", PROGRAM, cwd=tmp_path)
    asked = subprocess.run([python.with_name("tpsample")], capture_output=True, text=True)
    assert asked.returncode == 1 and "the command line needs typer" in asked.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHERS, ids=lambda v: ".".join(map(str, v)))
def test_the_sdist_runs_its_own_tests_and_benchmarks(
    built: Path, version: tuple[int, int], tmp_path: Path
) -> None:
    interpreter = _interpreter(version)
    if interpreter is None:
        pytest.skip(f"needs Python {version[0]}.{version[1]}, on the path or of pyenv")
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.glob("tpsample-*")
    subprocess.run([interpreter, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", f"{unpacked}[test,cli]", cwd=tmp_path)
    shown = _run(python, "-m", "pytest", "-q", *OWN_TESTS, cwd=unpacked)
    assert re.search(r"\d+ passed", shown) and "failed" not in shown
    _run(python, "-m", "benchmarks.gpu.check", "--help", cwd=unpacked)
