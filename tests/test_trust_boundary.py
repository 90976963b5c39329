"""Nothing that a peer or a file sends is unpickled, evaluated or given to a shell.

There are two exceptions. The user's own cache of compiled kernels is loaded, see
`tests/backends/numba_/test_kernel_cache.py`; and a process that compiles with this one is started
by a command in which nothing comes from outside.
"""

import ast
from pathlib import Path

import pytest
import torch

import tpsample
from tpsample.exchange.inboxes import SharedFiles

SOURCES = sorted(Path(tpsample.__file__).parent.rglob("*.py"))
MODULES = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "runpy"),
    "numba.core.serialize",
}
EXCEPTIONS = {"kernel_cache": ["numba.core.serialize"], "compiled_ahead": ["subprocess"]}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("system", "popen"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def runs(module: str) -> bool:
    """Return whether a module runs what it reads."""
    return module in MODULES or module.partition(".")[0] in MODULES


def forbidden(source: str) -> list[str]:
    """Return what a source uses that runs or unpickles what it is given."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if runs(each.name)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module] * runs(module)
        elif isinstance(node, ast.Call):
            name, builtin = getattr(node.func, "attr", ""), getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if builtin in BUILTINS | CALLS or name in CALLS or (owner, name) == ("torch", "load"):
                found.append(name or builtin)
            found += [k.arg for k in node.keywords if k.arg in ("shell", "trust_remote_code")]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_source_runs_what_it_is_given(path):
    assert forbidden(path.read_text()) == EXCEPTIONS.get(path.stem, [])


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "eval(x)", "os.system(x)", "torch.load(x)"),
        "from numba.core.serialize import loads",
        *("dist.all_gather_object(a, b)", "run(x, shell=True)", "f(trust_remote_code=True)"),
    ],
)
def test_the_search_finds_what_it_should(source):
    assert forbidden(source)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/other", "/dev/shm/../etc/tpsample-x", ""]
)
def test_a_peer_cannot_name_another_file(path):
    with pytest.raises(RuntimeError, match="no file of this exchange"):
        SharedFiles.map_file(path, (1,))


def test_shared_files_map_what_they_should(tmp_path, monkeypatch):
    monkeypatch.setattr(SharedFiles, "FOLDER", str(tmp_path))
    (tmp_path / "tpsample-x").write_bytes((7).to_bytes(8, "little"))
    assert torch.equal(SharedFiles.map_file(str(tmp_path / "tpsample-x"), (1,)), torch.tensor([7]))
