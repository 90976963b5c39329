"""Several ranks compile before they meet what later calls need; one rank compiles what it calls."""

from __future__ import annotations

import logging
import pkgutil
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fuzz.heads import ModelHead, OneRank
from tests.fuzz.requests import THEMES
from tests.fuzz.story import Story
from tests.support.calls import CALLS, call, head_of, params_of
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tpsample import LMHeadSampler, SamplingBatch
from tpsample.backends.numba_ import kernels
from tpsample.backends.numba_.kernels import compiled_ahead, kernel_cache, pairs
from tpsample.backends.numba_.kernels.kernel_cache import KernelCache
from tpsample.request.kinds import KINDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_kernel_that_python_calls_is_among_them():
    modules = [
        import_module(found.name)
        for found in pkgutil.iter_modules(kernels.__path__, "tpsample.backends.numba_.kernels.")
    ]
    every = {
        value.py_func.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(getattr(value, "_cache", None), KernelCache)
    }
    found = compiled_ahead.entries(torch.empty(1, 4), screened=True)
    of_trainers = {pairs.pair_products.py_func.__name__, pairs.add_weighted_rows.py_func.__name__}
    assert {kernel.py_func.__name__ for kernel, _ in found} == every - of_trainers
    assert len(every) > 10
    assert len(set(found)) == len(found)


@contextmanager
def known_in_construction() -> Iterator[None]:
    """Let a kernel fail that is loaded or compiled although no constructor has prepared it."""
    known: set[tuple[Any, tuple]] = set()
    compile_missing, alone = compiled_ahead.compile_missing, KernelCache.alone

    def prepare(weight: torch.Tensor, **how: bool) -> None:
        every = compiled_ahead.entries(weight, **how)
        known.update((kernel.py_func, types) for kernel, types in every)
        compile_missing(weight, **how)

    def take(self: KernelCache, types: tuple) -> Any:
        assert (self._function, types) in known, f"{self._function.__name__} in a step: {types}"
        return alone(self, types)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_ahead, "compile_missing", prepare)
        patch.setattr(KernelCache, "alone", take)
        yield


def _call_all(sampler: LMHeadSampler) -> list[Any]:
    """Make every collective call, of every kind, and return the tokens that came."""
    found: list[Any] = []
    weight = sampler.weight
    for kind in [*KINDS.values(), {"top_p": 0.9, "top_k": 3, "ties": "keep"}]:
        kept = {"kept_cap": 4} if {"top_k", "top_p"} & set(kind) else {}
        batch = SamplingBatch.from_params(params_of(**kind), vocab_size=10, **kept)
        found.append(sampler(torch.ones(2, 4).to(weight), batch, 3).token_ids)
        for dtype in DTYPES:
            logits = torch.arange(10).view(2, 5).to(dtype)
            found.append(sampler.sample_logits(logits, batch, 3, num_samples=2).token_ids)
    for name in CALLS:
        hidden = CALLS[name].get("hidden_states")
        changes = {} if hidden is None else {"hidden_states": hidden.right.to(weight)}
        found.append(call(sampler, name, **changes))
    for method in ("coupled", "rejection", "block"):
        changes = {} if method != "coupled" else {"draft_logits": None}
        hidden = CALLS["verify"]["hidden_states"].right.to(weight)
        found.append(call(sampler, "verify", hidden_states=hidden, method=method, **changes))
    return [getattr(each, "token_ids", each) for each in found]


def _stories(count: int, exact: bool) -> int:
    """Take random steps, which an oracle judges, and every call there is."""
    rank, rows = dist.get_rank(), 0
    with known_in_construction():
        for dtype in DTYPES[: 1 if exact else 3]:
            _call_all(LMHeadSampler(head_of(rank).to(dtype), backend="numba", max_rows=8))
        for seed in range(count):
            pick = random.Random(seed)
            theme = THEMES[pick.choice(list(THEMES))]
            head = ModelHead.make(pick, dist.get_world_size(), exact=exact, most=theme.most_ids)
            how = {"screening": pick.choice([None, "int8"]), "max_rows": 48}
            logits = seed % 3 == 2
            ranks = OneRank(rank, head, pick, from_logits=logits, backend="numba", **how)
            story = Story(pick, head, ranks, theme, max_rows=12, name=f"seed {seed}")
            story.run(6).require_none_wrong("ranks")
            rows += story.taken
            ranks.close()
    return rows


@pytest.mark.parametrize(("count", "exact"), [(6, True), *long((60, False))])
def test_no_call_of_several_ranks_compiles(count, exact):
    rows = run_ranks(2, _stories, count, exact, timeout_s=900)
    assert rows[0] == rows[1] > count


@pytest.mark.parametrize("seconds", [3, 30])
def test_what_is_compiled_is_told_of_once(seconds, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path / "n")
    monkeypatch.setattr(compiled_ahead, "SECONDS_EACH", seconds)
    kernel, types = _spread()
    monkeypatch.setattr(compiled_ahead, "entries", lambda _, **how: [(_new(kernel), types)])
    caplog.set_level(logging.INFO)
    for _ in range(2):
        compiled_ahead.compile_missing(torch.empty(1, 0))
    (said,) = (record for record in caplog.records if record.name == compiled_ahead.__name__)
    text = f"compiling the kernels of this CPU, once per machine: about {seconds} s"
    assert said.getMessage() == text
    assert said.levelno == (logging.WARNING if seconds == 30 else logging.INFO)


def _spread() -> tuple[Any, tuple]:
    """Return a kernel that is compiled in no time, and the types of its arguments."""
    (found,) = (
        each for each in compiled_ahead.entries(torch.empty(1, 0)) if "spread" in str(each[0])
    )
    return found


def _new(kernel: Any) -> Any:
    """Return a kernel that has nothing in memory, as in a new process."""
    from tpsample.backends.numba_.kernels.compiling import jit

    return jit(entry=True)(kernel.py_func)


def test_another_process_compiles_from_the_end(tmp_path, monkeypatch):
    """It puts the code where this process looks for it."""
    kernel, types = compiled_ahead.entries(torch.empty(1, 4), screened=False)[-1]
    name = Path("tpsample", kernel_cache.folder().name, f"{kernel._cache._name(types)}.lock")
    started: list[Popen] = []

    def start(*command: Any, **how: Any) -> Popen:
        started.append(Popen(*command, **how))
        return started[-1]

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", start)
    limit, found = time.monotonic() + 60 * slowness(), set()
    with compiled_ahead.second_process(torch.empty(1, 4), screened=False):
        while not found and time.monotonic() < limit:
            time.sleep(0.05)
            found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name} and "decode.decode" in str(name)
    assert [process.returncode for process in started] == [-signal.SIGKILL]  # with the body


@pytest.mark.parametrize("python", [None, shutil.which("false")])
def test_a_process_that_cannot_be_started_changes_nothing(python, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path / "n")
    monkeypatch.setattr(compiled_ahead, "FEW", 0)
    monkeypatch.setattr(compiled_ahead.spawn, "get_executable", lambda: python)
    kernel, types = _spread()
    new = _new(kernel)
    monkeypatch.setattr(compiled_ahead, "entries", lambda _, **how: [(new, types)])
    compiled_ahead.load_all(torch.empty(1, 0))
    assert types in new.overloads


def test_one_rank_compiles_what_it_calls(monkeypatch):
    monkeypatch.setattr(compiled_ahead, "compile_missing", _fail)
    LMHeadSampler(torch.ones(10, 4), backend="numba")


def _fail(*_: object) -> None:
    raise AssertionError("there is nobody to wait for")
