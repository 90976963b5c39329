"""The interpreter that does once what it did again and again computes what Triton's does."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.support.commands import run_command
from tests.support.interpreter import _WRITTEN_FOR, spare_repetitions

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(_WRITTEN_FOR), reason="this Triton is left as it is"
)


@triton.jit
def _halves(values):
    left, right = values.reshape((2, 8)).permute((1, 0)).split()
    return left, right, tl.max(values)


@triton.jit
def _kernel(in_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(in_ptr + offs, mask=offs < count, other=-1)
    left, right, most = _halves(values)
    mixed = (left * 1103515245).to(tl.uint32) >> 7
    text = tl.where(mixed > 9, mixed.to(tl.int64) << 33, right.to(tl.int64)) + most
    text = (text + 2) ^ (left * 2).to(tl.int64) ^ (left * 2.0).to(tl.int64)
    signs = tl.where(left < 0, -1.0, right.to(tl.float32)) * (7 - left) / 3 + left.to(tl.float64)
    before = tl.load(in_ptr + count - (tl.arange(0, 8) + 1))
    text = text ^ (2.5 * signs + before).to(tl.int64) ^ (1 << (before & 31)) ^ (left >= before)
    tl.store(out_ptr + tl.program_id(0) * 8 + tl.arange(0, 8), text)
    scores = values.to(tl.float32)[:, None] * tl.arange(0, 4).to(tl.float32)[None, :]
    tl.atomic_max(out_ptr + 32, tl.sum(scores + 2).to(tl.int64))


@triton.jit
def _constants(in_ptr, out_ptr):
    value, place = tl.load(in_ptr + tl.program_id(0)), out_ptr + 4 * tl.program_id(0)
    tl.store(place, value / 2)
    tl.store(place + 1, value + 2)
    tl.store(place + 2, value + 2.5)
    tl.store(place + 3, (value + 2.0) / 4)


def computed() -> list[int]:
    values = torch.randint(-(2**31), 2**31, (60,), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(33, dtype=torch.int64)
    _kernel[(4,)](values.int(), out, 60, BLOCK=16)
    return out.tolist()


def test_a_kernel_computes_the_same_without_it():
    program = "from tests.test_interpreter import computed; print(computed())"
    env = {"TRITON_INTERPRET": "1"}
    done = run_command(sys.executable, "-W", "ignore", "-c", program, env=env)
    assert done.stdout.strip() == str(computed()), done.stderr


def test_operators_are_remembered_and_told_apart_by_types_and_constants():
    """The second program of a launch takes what the first one has found."""
    found = torch.ones(2, 4)
    _constants[(2,)](torch.tensor([5, -6], dtype=torch.int32), found)
    assert found.tolist() == [[2.5, 7, 7.5, 1.75], [-3, -4, -3.5, -1]]


def test_operations_are_put_in_place_once(monkeypatch):
    spare_repetitions()
    once, made = interpreter._patch_lang, []
    patch = once._patch
    monkeypatch.setattr(once, "_patch", lambda fn: made.append(fn.__name__) or patch(fn))
    monkeypatch.setattr(once, "_in_place", set())
    for _ in range(3):
        computed()
    assert made[0] == "_kernel" and len(made) <= 2  # tl, then tl.core for what tl itself jits


def test_a_launch_after_one_that_failed_computes_the_same():
    expected = computed()
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](torch.zeros(16, dtype=torch.int32), None, 16, BLOCK=16)
    assert computed() == expected
