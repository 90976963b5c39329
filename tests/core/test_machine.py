"""A CPU without Numba takes the definition, and says in one line why."""

import importlib
import json
import shlex
from functools import partial
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import torch

import tpsample
from tests.support.commands import ROOT
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.agreement import construction
from tpsample.core import machine
from tpsample.core.machine import numba_missing

WAY_OUT = f"; {machine.how_to_install('cpu')}"
WHEEL = "/tmp/a b/tpsample-0.1.0-py3-none-any.whl"
CAME = {
    "a clone, editable": (
        {"url": "file:///home/a%20b", "dir_info": {"editable": True}},
        "pip install -e '/home/a b[cpu]'",
    ),
    "a wheel": (
        {"url": f"file://{quote(WHEEL)}", "archive_info": {}},
        f"pip install 'tpsample[cpu] @ file://{quote(WHEEL)}', with its new place, because nothing "
        "is there now",
    ),
    "an address": (
        {"url": "https://host/tpsample.whl", "archive_info": {}},
        "pip install 'tpsample[cpu] @ https://host/tpsample.whl'",
    ),
    "a repository": (
        {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
        "pip install 'tpsample[cpu] @ git+https://host/r.git@0123'",
    ),
    "a name": (None, f"pip install 'tpsample[cpu]=={tpsample.__version__}'"),
}
"""The notes of pip beside the package, and the command that then installs an extra."""


@pytest.mark.parametrize("came", CAME)
def test_an_extra_is_installed_from_where_the_package_came(came, monkeypatch):
    written, command = CAME[came]
    text = None if written is None else json.dumps(written)
    beside = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(machine, "distribution", lambda name: beside)
    assert machine.how_to_install("cpu") == command


def test_files_on_the_path_are_installed_where_they_lie(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "distribution", missing)
    assert machine.how_to_install("cpu") == f"pip install {shlex.quote(f'{ROOT}[cpu]')}"


def _raises(error):
    def load(name):
        raise error

    return load


def _numba(name, **without):
    """Return a stand-in for a module of Numba; some are not there, or say something else."""
    if name in without.get("missing", ()):
        raise ImportError(f"No module named '{name}'")
    return SimpleNamespace(__version__="0.68.1", DISABLE_JIT=without.get("disabled", 0))


@pytest.fixture(
    params=[
        (_raises(ImportError("No module named 'numba'")), "Numba cannot be imported (No module"),
        (_raises(SystemError("a bad\nmodule")), "Numba is broken (SystemError: a bad module)"),
        (lambda name: SimpleNamespace(__version__="0.60.0"), "Numba 0.60.0 is older than 0.61"),
        (partial(_numba, missing=["numba.extending"]), "Numba is broken (ImportError: No module"),
        (partial(_numba, disabled=1), "NUMBA_DISABLE_JIT is set, so Numba compiles nothing; unset"),
    ],
    ids=["missing", "broken", "old", "not whole", "disabled"],
)
def said(request, monkeypatch):
    load, message = request.param
    monkeypatch.setattr(construction, "interpreted", lambda: False)
    numba_missing.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", load)
        numba_missing()  # which is kept
    yield message
    numba_missing.cache_clear()


def test_a_cpu_without_it(said):
    reason = numba_missing()
    assert reason.startswith(said)
    assert reason.endswith("unset it" if "NUMBA_DISABLE_JIT" in reason else WAY_OUT)
    assert "\n" not in reason
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    for arguments in ({"backend": "numba"}, {"screening": "int8"}):
        with pytest.raises(ValueError) as raised:
            LMHeadSampler(weight, **arguments)
        assert str(raised.value).endswith(reason)
    batch = SamplingBatch.from_params([SamplingParams(seed=1)] * 4, vocab_size=50)
    found = []
    for backend in ("auto", "torch"):
        with LMHeadSampler(weight, backend=backend) as sampler:
            assert "backend='torch'" in repr(sampler)
            found.append(sampler(weight[:4], batch, 0).token_ids.tolist())
    assert found[0] == found[1]


def test_a_cpu_with_it(monkeypatch):
    monkeypatch.setattr(construction, "interpreted", lambda: False)
    assert numba_missing() is None
    with LMHeadSampler(torch.zeros(5, 8)) as sampler:
        assert "backend='numba'" in repr(sampler)


@pytest.mark.parametrize(("version", "old"), [("0.61.0rc1", False), ("1.0", False), ("0.9", True)])
def test_versions(version, old, monkeypatch):
    numba_missing.cache_clear()
    with monkeypatch.context() as patched:
        found = SimpleNamespace(__version__=version, DISABLE_JIT=0)
        patched.setattr(importlib, "import_module", lambda _: found)
        assert (numba_missing() is not None) is old
    numba_missing.cache_clear()


@pytest.mark.parametrize(
    ("arch", "triton", "expected"),
    [
        (90, "3.6.0", "without the fence"),
        (100, "3.7.0+git12", "without the fence"),
        (100, "3.9.0", "before it waits"),
        (103, "3.10", "before it waits"),
        (90, "3.9.0", None),
        (100, "3.7.1", None),
        (80, "3.6.0", None),
        (120, "3.6.0", None),
        (0, "3.6.0", None),
    ],
)
def test_what_is_known_against_a_compiler_is_said(arch, triton, expected):
    doubt = machine.compiler_doubt(arch, triton)
    assert (doubt is None) == (expected is None)
    assert doubt is None or (expected in doubt and f"sm_{arch}" in doubt)
