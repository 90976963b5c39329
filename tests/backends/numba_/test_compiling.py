"""Compiled kernels are kept where a folder can be written, and made anew where none can."""

import gc
from contextlib import nullcontext

import pytest
import torch
from numba import int64

from tpsample.backends.numba_.kernels import compiled_ahead, compiling, kernel_cache


def test_the_first_kernel_that_a_process_compiles_is_told_once(monkeypatch, caplog):
    kernel, types = compiled_ahead.entries(torch.empty(1, 1))[-1]
    monkeypatch.setattr(compiling, "announced", [])
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
