"""Whatever happens to the cache of the kernels, a call goes on, says so once, and waits for nobody.

One small kernel is compiled as often as a test needs it: `fresh` returns one that has nothing in
memory yet, as in a new process.
"""

from __future__ import annotations

import ast
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
import torch.distributed as dist

from tests.support.commands import ROOT, run_command
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tpsample.backends.numba_.kernels import compile_lock, compiled_ahead, compiling, kernel_cache
from tpsample.backends.numba_.kernels.compiling import is_ready, jit
from tpsample.core.repeated import repeated

MAKE_FOLDER = kernel_cache.folder.__wrapped__
NOBODY = 65534
COMPILING_S = 10.0
"""More than it takes to compile `add`, and less than any wait for somebody else."""


def add(a, b):
    total = a
    for _ in range(1000):
        total += b
    return total


def fresh() -> Any:
    """Return `add` as a kernel that has no code in memory."""
    return jit(entry=True)(add)


def call(kernel: Any | None = None) -> int:
    """Call a kernel that may have to be compiled; return how often it was loaded."""
    kernel, began = kernel or fresh(), time.monotonic()
    assert kernel(1, 2) == 2001
    assert time.monotonic() - began < COMPILING_S * slowness()
    return sum(kernel.stats.cache_hits.values())


def code_in(folder: Path) -> Path:
    """Return the one file of compiled code."""
    (found,) = (path for path in folder.iterdir() if path.suffix != ".lock")
    return found


def lock_of(path: Path) -> Path:
    return Path(f"{path}.lock")


def imported_by(paths: Iterable[Path]) -> set[Path]:
    """Return the files of the package that these files import, and so on, with themselves."""
    found, left = set(paths), list(paths)
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpsample"):
                module = ROOT / (node.module or "").replace(".", "/")
                near = [module / each.name for each in node.names] + [module]
                new = {path for each in near if (path := each.with_suffix(".py")).is_file()}
                left += new - found
                found |= new
    return found


def test_the_folder_is_named_by_every_file_that_decides_what_kernels_compute():
    kernels = list(Path(kernel_cache.__file__).parent.glob("*.py"))
    assert len(kernels) > 15
    imported = imported_by(kernels)
    assert {path.name for path in imported} >= {"bound.py", "masses.py", "noise.py"}
    assert imported - set(kernel_cache.sources()) == set()


def use(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the cache be that folder, in a process that has said that it compiles, and no more."""
    patch.setattr(kernel_cache, "folder", lambda: folder)
    patch.setattr(kernel_cache, "_failed", False)
    patch.setattr(compiling, "announced", ["all"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the code of `add`."""
    use(tmp_path / "tpsample" / "native", monkeypatch)
    assert call() == 0 and call() == 1
    return tmp_path / "tpsample" / "native"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    kernel_cache._failed = False
    return found


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def test_the_folder_is_its_owners(folder):
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    assert code_in(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", [0, 1, 32, 33, 1000, -1])
def test_a_file_that_is_cut_is_compiled_anew(cut, folder, caplog):
    path = code_in(folder)
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    assert call() == 0
    (said,) = warnings_of(caplog)
    assert str(folder) in said and "damaged" in said and "NUMBA_CACHE_DIR" in said
    assert call() == 1
    assert not warnings_of(caplog)


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_flipped_bit_is_seen_before_anything_is_loaded(place, folder, caplog):
    flip(code_in(folder), place)
    assert call() == 0 and call() == 1
    assert len(warnings_of(caplog)) == 1


def test_an_error_without_a_text_is_told_by_its_type(folder, caplog, monkeypatch):
    def read(_: str) -> None:
        raise MemoryError

    monkeypatch.setattr(kernel_cache, "_read", read)
    assert call() == 0
    (said,) = warnings_of(caplog)
    assert "failed (MemoryError)" in said


def _time_is_up(*_: object) -> None:
    raise TimeoutError("time is up")


@pytest.mark.parametrize("part", ["_read", "_source", "_replaced"])
def test_what_the_handler_of_a_signal_raises_reaches_the_caller(part, folder, caplog, monkeypatch):
    if part == "_replaced":  # a file is written
        code_in(folder).unlink()
    monkeypatch.setattr(kernel_cache, part, lambda *_: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, _time_is_up)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            call()
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    use(folder, monkeypatch)
    assert fresh()(1, 2) == 2001
    assert not warnings_of(caplog)


class _Timer:
    def __call__(self, *_: object) -> None:
        raise TimeoutError("time is up")


@pytest.mark.parametrize(
    "handler",
    [partial(_time_is_up), _Timer(), _Timer().__call__, partial(_Timer())],
    ids=["partial", "object", "method", "partial of an object"],
)
def test_a_handler_of_any_kind_is_known_by_its_code(handler):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError), kernel_cache._reported():
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_code_of_another_kernel_is_not_taken(folder, caplog):
    path = code_in(folder)
    content = path.read_bytes()
    fresh()(1.0, 2.0)
    (other,) = (each for each in folder.iterdir() if each.suffix != ".lock" and each != path)
    other.write_bytes(content)
    assert fresh()(1.5, 2.0) == 2001.5
    assert len(warnings_of(caplog)) == 1


class _Marks:
    """A value that makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (_Marks.path,)

    path = ""


@pytest.mark.parametrize("of", ["file", "folder"])
@pytest.mark.parametrize("how", ["writable", "foreign"])
def test_what_others_can_write_is_not_run(of, how, folder, caplog):
    """A file that would pass every other check runs a command if it is loaded."""
    if how == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root, which can give files away")
    path, _Marks.path = code_in(folder), str(folder.parent / "ran")
    code = kernel_cache.dumps(_Marks())
    path.write_bytes(kernel_cache._digest(path.name.encode(), code) + code)
    changed = path if of == "file" else folder
    if how == "writable":
        changed.chmod(changed.stat().st_mode | 0o020)
    else:
        os.chown(changed, NOBODY, NOBODY)
    assert call() == 0 and not os.path.exists(_Marks.path)
    (said,) = warnings_of(caplog)
    assert str(changed) in said


def test_a_folder_that_goes_away_is_made_again(folder, caplog):
    kernel = fresh()
    assert kernel(1, 2) == 2001
    shutil.rmtree(folder.parent)
    assert kernel(1.0, 2.0) == 2001.0 and code_in(folder)
    assert not warnings_of(caplog)


def test_code_that_was_seen_needs_no_file(folder):
    kernel, types = fresh(), next(iter(fresh_types()))
    assert is_ready(kernel, types)
    shutil.rmtree(folder.parent)
    assert call(kernel) == 1


def fresh_types() -> list[tuple]:
    kernel = fresh()
    kernel(1, 2)
    return list(kernel.overloads)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Leave no room in a folder, or let every writing fail where none can be mounted."""
    size = ("-o", "size=4k,mode=700")
    command = ["mount", "-t", "tmpfs", *size, "tmpfs", str(folder)]
    if shutil.which("mount") and not subprocess.run(command, stderr=subprocess.PIPE).returncode:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", _no_space)
        yield


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(folder, caplog):
    code_in(folder).unlink()
    with full_disk(folder):
        kernel = fresh()
        assert call(kernel) == 0 and kernel(1.0, 2.0) == 2001.0
        (said,) = warnings_of(caplog)
        assert "No space left" in said
        assert [path.suffix for path in folder.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("obstacle", ["a file for a folder", "a folder for a lock", "no home"])
def test_a_cache_that_cannot_be_made(obstacle, tmp_path, monkeypatch, caplog):
    use(tmp_path / "tpsample" / "native", monkeypatch)
    if obstacle == "a file for a folder":
        (tmp_path / "tpsample").touch()
    elif obstacle == "a folder for a lock":
        call()
        lock = lock_of(code_in(tmp_path / "tpsample" / "native"))
        code_in(lock.parent).unlink()
        lock.unlink()
        lock.mkdir()
    else:
        monkeypatch.setattr(kernel_cache, "folder", MAKE_FOLDER)
        for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "expanduser", _no_home)
    assert call() == 0
    assert len(warnings_of(caplog)) == 1


def _no_home(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def _as_nobody(folder: str) -> tuple[int, list[str]]:
    """Use a cache that is root's, as another user who may not even read it."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        use(Path(folder), patch)
        patch.setattr(kernel_cache.log, "warning", lambda text, *values: said.append(text % values))
        os.seteuid(NOBODY)
        return call(), said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777], ids=oct)
def test_the_cache_of_another_user(mode, folder):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        other = shutil.copytree(folder, f"{place}/native")
        os.chmod(other, mode)
        ((hits, said),) = run_ranks(1, _as_nobody, other)
    assert hits == 0 and len(said) == 1


SETTINGS = ["CPU_NAME", "CPU_FEATURES", "OPT", "BOUNDSCHECK", "ENABLE_AVX"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_changes_code_has_a_folder_of_its_own(setting, monkeypatch):
    make = MAKE_FOLDER
    before = make()
    monkeypatch.setattr(kernel_cache.config, setting, "other")
    assert make() != before and make().parent == before.parent


def test_another_cpu_has_a_folder_of_its_own(monkeypatch):
    make = MAKE_FOLDER
    before = make()
    monkeypatch.setattr(kernel_cache.binding, "get_host_cpu_name", lambda: "other")
    assert make() != before


@contextmanager
def held(folder: Path, *, alive: bool) -> Iterator[Callable[[], object]]:
    """Let another process hold the lock of the one file; the result ends it."""
    lock = lock_of(code_in(folder))
    script = "import fcntl, select, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)"
    wait = f"print(flush=True); select.select([sys.stdin], [], [], {2 * COMPILING_S * slowness()})"
    command = [sys.executable, "-c", f"{script}; {wait}", str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        with repeated(lambda: os.utime(lock) if alive else None, 0.05):
            yield process.kill
        process.kill()


def test_whoever_compiles_is_waited_for_and_the_code_is_loaded(folder):
    path = code_in(folder)
    content = path.read_bytes()
    with held(folder, alive=True):
        path.unlink()
        threading.Timer(1.0, path.write_bytes, [content]).start()
        assert call() == 1


def test_a_process_that_compiles_says_that_it_lives(folder, monkeypatch):
    monkeypatch.setattr(compile_lock, "BEAT_S", 0.05)
    lock = lock_of(code_in(folder))
    os.utime(lock, (0, 0))
    with compile_lock.alone(lock, lambda: False):
        deadline = time.monotonic() + 10 * slowness()
        while not lock.stat().st_mtime and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lock.stat().st_mtime


@pytest.mark.parametrize("how", ["stuck", "slow", "killed"])
def test_a_process_that_does_not_end_to_compile_is_not_waited_for(how, folder, monkeypatch):
    monkeypatch.setattr(compile_lock, "STUCK_S", 0.5 if how == "stuck" else 100.0)
    monkeypatch.setattr(compile_lock, "LONGEST_S", 0.5 if how == "slow" else 100.0)
    with held(folder, alive=how != "stuck") as kill:
        code_in(folder).unlink()
        if how == "killed":
            kill()
        assert call() == 0
        assert call() == 1


def test_loading_and_other_kernels_wait_for_nobody(folder, monkeypatch):
    monkeypatch.setattr(compile_lock, "STUCK_S", 100.0)
    with held(folder, alive=True):
        assert call() == 1
        began = time.monotonic()
        assert fresh()(1.0, 2.0) == 2001.0
        assert time.monotonic() - began < COMPILING_S * slowness()


def test_processes_share_what_has_to_be_compiled(folder, monkeypatch):
    """A kernel is left to the process that compiles it until nothing else is missing."""
    (ints,) = fresh_types()
    first, second, path = fresh(), fresh(), code_in(folder)
    content = path.read_bytes()
    floats = tuple([numba.float64] * 2)
    monkeypatch.setattr(
        compiled_ahead, "entries", lambda _, **how: [(first, ints), (second, floats)]
    )
    with held(folder, alive=True):
        path.unlink()
        compiled = second._compiler.compile
        second._compiler.compile = lambda *of: path.write_bytes(content) and compiled(*of)
        compiled_ahead.compile_missing(torch.empty(1, 4))
    assert list(second.overloads) == [floats]
    assert not first.overloads and is_ready(first, ints)


FORKS = """
import os, sys, threading, time
from tpsample.backends.numba_.kernels import compile_lock
from tpsample.backends.numba_.kernels.compiling import jit

@jit(entry=True)
def add(a, b):
    return a + b

@jit(entry=True)
def multiply(a, b):
    return a * b

compiled, inside = add._compiler.compile, threading.Event()

def compile_slowly(*arguments):
    inside.set()
    time.sleep(1)
    return compiled(*arguments)

add._compiler.compile = compile_slowly
thread = threading.Thread(target=add, args=(1, 2))
thread.start()
inside.wait()
read, write = os.pipe()
if child := os.fork():
    os.close(write)
    assert os.read(read, 1) == b"x"  # the child has compiled; it goes on to live
    thread.join()
    assert add(1.0, 2.0) == 3.0
    print("parent", os.waitpid(child, os.WNOHANG)[0])
    os.kill(child, 9)
else:
    assert multiply(3, 4) == 12 and add(1, 2) == 3 and not compile_lock._opened
    os.write(write, b"x")
    time.sleep(600)
"""


def test_a_process_may_fork_while_a_thread_compiles(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORKS)
    its_cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = run_command(sys.executable, script, env=its_cache, timeout_s=60)
    assert done.returncode == 0 and done.stdout == "parent 0\n"


def _cut(path: Path, dice: random.Random) -> None:
    with open(path, "r+b") as file:
        file.truncate(dice.randrange(path.stat().st_size))


def _flip(path: Path, dice: random.Random) -> None:
    flip(path, dice.randrange(path.stat().st_size))


def _fill(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(dice.randrange(1 << 16)))


def _forbid(path: Path, dice: random.Random) -> None:
    dice.choice([path, path.parent]).chmod(dice.choice([0o000, 0o400, 0o666, 0o777]))


def _put_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _put_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _put_link(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


FAULTS: list[Callable[[Path, random.Random], Any]] = [
    *(_cut, _flip, _cut, _flip, _fill, _forbid, _put_folder, _put_pipe, _put_link),
    lambda path, _: shutil.rmtree(path.parent),
    lambda path, _: path.unlink(),
]


def _meet_faults(folder: str, count: int) -> list[str]:
    """Break the cache again and again; all ranks then call the kernel at once."""
    path, dice = Path(folder), random.Random(dist.get_rank())
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        use(path, patch)
        patch.setattr(kernel_cache.log, "warning", lambda text, *values: said.append(text % values))
        for turn in range(count):
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
                call()
                FAULTS[turn % len(FAULTS)](code_in(path), dice)
            dist.barrier()
            kernel_cache._failed = False
            call()
            dist.barrier()
    return said


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(2, 11), *(pytest.param(ranks, 220, marks=pytest.mark.long) for ranks in (1, 2))],
)
def test_processes_that_meet_many_faults(ranks, count, tmp_path):
    found = run_ranks(ranks, _meet_faults, str(tmp_path / "native"), count, timeout_s=900)
    assert all(len(said) <= count for said in found) and any(found)
    assert all("the kernel cache" in text for said in found for text in said)
