"""Compiled kernels are kept where a folder can be written, and made anew where none can."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from numba import int64

from tests.support.commands import ROOT
from tpsample.backends.numba_.kernels import compiled_ahead, compiling, kernel_cache

SCRIPT = """
import sys, time
from pathlib import Path
from tpsample.backends.numba_.kernels.compiling import jit
from tpsample.backends.numba_.kernels.kernel_cache import folder

@jit(entry=True)
def add(a, b):
    total = a
    for i in range(1000):
        total += b
    return total

if len(sys.argv) > 1:
    mine, other = map(Path, sys.argv[1:])
    mine.touch()
    while not other.exists():
        time.sleep(0.001)
print(add(1, 2), folder().is_dir(), sum(add.stats.cache_hits.values()))
"""


def start(script: Path, cache: Path, *arguments: Path) -> subprocess.Popen:
    script.write_text(SCRIPT)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen) -> list[str]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return output.split()


def test_two_processes_begin_at_once_and_a_third_compiles_nothing(tmp_path):
    cache, script = tmp_path / "cache", tmp_path / "script.py"
    flags = [tmp_path / "0", tmp_path / "1"]
    both = [start(script, cache, *each) for each in (flags, flags[::-1])]
    found = [said(each) for each in both]
    assert [each[:2] for each in found] == [["2001", "True"]] * 2
    assert sorted(each[2] for each in found) == ["0", "1"]  # the second one waited for the first
    assert said(start(script, cache)) == ["2001", "True", "1"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    assert said(start(tmp_path / "script.py", tmp_path / "file")) == ["2001", "False", "0"]


def test_the_first_kernel_that_a_process_compiles_is_told_once(monkeypatch, caplog):
    kernel, types = compiled_ahead.entries(torch.empty(1, 1))[-1]
    monkeypatch.setattr(compiling, "told", [])
    monkeypatch.setattr(compiling, "is_ready", lambda *_: False)
    kernel.compile(types)
    kernel.compile(types)
    assert [record.getMessage()[:17] for record in caplog.records] == ["compiling decode,"]
    assert "once per machine" in caplog.text


@pytest.mark.parametrize("looks", [True, False])
def test_the_search_for_garbage_stops_while_a_kernel_compiles(looks, monkeypatch):
    kernel, types = compiled_ahead.entries(torch.empty(1, 1))[-1]
    seen: list[bool] = []
    monkeypatch.setattr(kernel._cache, "alone", lambda _: nullcontext())
    monkeypatch.setattr(compiling.gc, "disable", lambda own=gc.disable: (own(), seen.append(True)))
    try:
        (gc.enable if looks else gc.disable)()
        seen.clear()
        kernel.compile(types)
        with pytest.raises(KeyError), compiling.uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == looks and seen == [True, True]
    finally:
        gc.enable()


def test_only_what_python_calls_becomes_machine_code(tmp_path, monkeypatch):
    @compiling.jit()
    def double(number):
        return number + number

    @compiling.jit(entry=True)
    def quadruple(number):
        return double(double(number))

    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path / "n")
    assert quadruple(3) == 12
    libraries = [each.overloads[int64,].library for each in (quadruple, double)]
    assert [hasattr(each, "_compiled_object") for each in libraries] == [True, False]
