"""Masses and moments: errors, and the same bits in every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support import masses_checker
from tpsample.backends.numba_.kernels import passes
from tpsample.backends.numba_.kernels.threads import in_ranges
from tpsample.backends.triton_.kernels import masses as triton_masses
from tpsample.backends.triton_.kernels import order as triton_order
from tpsample.core import masses
from tpsample.core.order import least_logit

LARGEST = float(np.finfo(np.float32).max)
N, PARTS = 256, 8
"""Logits of a row."""

# -- errors ------------------------------------------------------------------------------------


def _power_errors(first: int, stop: int, step: int) -> float:
    worst = 0.0
    for sign in (0, -(2**31)):
        for start in range(first, stop, step << 20):
            bits = np.arange(start, min(stop, start + (step << 20)), step, dtype=np.int32)
            f = (bits ^ np.int32(sign)).view(np.float32)
            error = masses_checker.power_of_2(f) / np.exp2(f.astype(np.float64)) - 1
            worst = max(worst, float(np.abs(error).max()))
    return worst


FIRST, STOP = (int(np.float32(x).view(np.int32)) for x in (2.0**-27, 0.50001))


def test_the_polynomial_is_within_its_bound() -> None:
    assert _power_errors(FIRST, STOP, 997) < 2**-23.2


@pytest.mark.long
def test_the_polynomial_is_within_its_bound_at_every_number() -> None:
    assert _power_errors(FIRST, STOP, 1) < 2**-23.2


def _rows(count: int, seed: int, *, hostile: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [count, N], their largest, and temperatures."""
    draw = np.random.default_rng(seed)
    temperature = 10 ** draw.uniform(-5, 3, count)
    top = draw.normal(size=count) * 10 ** draw.uniform(-6, 6, count) * np.sqrt(temperature)
    if hostile:
        temperature[: count // 4] = 2.0 ** draw.integers(-16, 101, count // 4)
        tops = [np.inf, -np.inf, np.nan, LARGEST, -LARGEST, 0.0, -0.0, 1e-45, 85.0, 58.9]
        top[: count // 2 : 2] = draw.choice(tops, -(-count // 4))
    temperature, top = temperature.astype(np.float32), top.astype(np.float32)[:, None]
    with np.errstate(all="ignore"):
        x = (top - draw.exponential(size=(count, N)) * 8 * temperature[:, None]).astype(np.float32)
    x = np.minimum(x, top)
    x[:, 0] = top[:, 0]
    if hostile:
        x[:, 1:4] = -np.inf, -LARGEST, LARGEST
        x = np.minimum(x, top)
    return torch.tensor(x), torch.tensor(top[:, 0]), torch.tensor(temperature)


def test_masses_and_entropies_are_within_their_bounds() -> None:
    logits, top, temperature = _rows(2000, 1, hostile=False)
    q, m = masses.masses_and_moments(logits, top.unsqueeze(1), temperature.unsqueeze(1))
    wide = np.longdouble(logits.numpy()), np.longdouble(top.numpy())[:, None]
    y = (wide[0] - wide[1]) / np.longdouble(temperature.numpy())[:, None]
    exact = np.exp(y) * np.longdouble(masses.TOP_MASS)
    error = np.abs(np.longdouble(q.numpy()) - exact)
    assert (error <= exact * 2**-22 + 0.5).all()
    assert (q[:, 0] == masses.TOP_MASS).all() and not m[:, 0].any()
    total = exact.sum(axis=1)
    sums = np.abs(np.longdouble(q.sum(dim=1).numpy()) - total) / total
    assert sums.mean() < 1e-8 and sums.max() < 1e-7
    entropy = np.log(total / masses.TOP_MASS) - (exact * y).sum(axis=1) / total
    z, mean = q.sum(dim=1).double(), m.sum(dim=1) / q.sum(dim=1).double()
    found = (z / masses.TOP_MASS).log() + masses.LN2 * mean
    assert np.abs(np.longdouble(found.numpy()) - entropy).max() < 5e-7


# -- backends ----------------------------------------------------------------------------------


def _torch(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    return masses.masses_and_moments(logits, top.unsqueeze(1), temperature.unsqueeze(1))


def _numba(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Each logit is a row, whose sums are its own."""
    rows = np.arange(logits.numel())
    each = (x.repeat_interleave(N).numpy() for x in (temperature, top))
    stored = passes.Stored(logits.numpy().reshape(-1, 1), 0, next(each), rows)
    sums = np.zeros((len(rows), 2), np.int64)
    cut, no_marks = np.zeros(len(rows), np.int64), np.zeros((len(rows), 0), np.int64)
    arguments = stored, next(each), cut, no_marks, sums
    in_ranges(passes.moment_from, 0, len(rows), 1, *arguments)
    return tuple(torch.from_numpy(sums).view(*logits.shape, 2).unbind(dim=2))


@triton.jit
def probe(  # type: ignore[no-untyped-def]
    logits_ptr,
    top_ptr,
    temperature_ptr,
    out_ptr,
    sums_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, rows = tl.program_id(0), tl.num_programs(0)
    its = triton_masses.mass_row(tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    offs = row * N + tl.arange(0, N)
    logits = tl.load(logits_ptr + offs)
    tl.store(out_ptr + offs, triton_masses.masses(logits, its))
    high, low = triton_masses.halves_of_masses(logits, its)
    tl.store(out_ptr + rows * N + offs, (high.to(tl.int64) << 20) + low)
    for i in range(PARTS):
        kept = tl.arange(0, N) % PARTS == i
        q, m = triton_masses.masses_and_moments(logits, its, kept)
        tl.store(sums_ptr + row * PARTS + i, tl.sum(q, axis=0))
        tl.store(sums_ptr + (rows + row) * PARTS + i, tl.sum(m, axis=0))


def _triton(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Masses, and of moments the sums over each eighth of a row."""
    out = torch.empty(2, *logits.shape, dtype=torch.int64)
    sums = torch.empty(2, len(logits), PARTS, dtype=torch.int64)
    probe[(len(logits),)](logits, top, temperature, out, sums, N, PARTS)  # type: ignore[index]
    assert torch.equal(out[0], out[1]) and torch.equal(_of_parts(out[0]), sums[0])
    return out[0], sums[1]


def _of_parts(each: Tensor) -> Tensor:
    return each.view(len(each), -1, PARTS).sum(dim=1)


def _checker(logits: Tensor, top: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    its = zip(logits.numpy(), top.numpy(), temperature.numpy(), strict=True)
    found = [masses_checker.masses_and_moments(*each) for each in its]
    return tuple(torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))


@pytest.mark.parametrize("backend", [_torch, _numba, _triton])
def test_every_backend_finds_the_bits_of_the_page(backend: Callable[..., Any]) -> None:
    for given in (_rows(75, 3, hostile=True), _rows(75, 4, hostile=False)):
        (masses, moments), (q, m) = backend(*given), _checker(*given)
        assert torch.equal(masses, q)
        assert torch.equal(moments, m if moments.shape == m.shape else _of_parts(m))


@triton.jit
def floor_probe(top_ptr, temperature_ptr, log_min_p_ptr, floor_ptr):  # type: ignore
    row = tl.program_id(0)
    its = tl.load(top_ptr + row), tl.load(temperature_ptr + row), tl.load(log_min_p_ptr + row)
    tl.store(floor_ptr + row, triton_order.least_logit(its[0], its[1], its[2]))


def test_floors_of_the_kernels_are_the_twins() -> None:
    _, top, temperature = _rows(400, 5, hostile=True)
    log_min_p = torch.linspace(-20, 0, 400, dtype=torch.float64)
    log_min_p[::3] = -torch.inf
    floor = torch.empty_like(top)
    floor_probe[(400,)](top, temperature, log_min_p, floor)  # type: ignore[index]
    expected = least_logit(top, temperature, log_min_p)
    assert torch.equal(floor.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_quick_sums_are_within_their_error_in_the_worst_row(sign: int) -> None:
    """Of 2^20 tokens all but the first are 16.6 bits below it, and all operations err alike."""
    number, top = 2**20 - 1, torch.tensor(20.0)
    below = torch.tensor(16.6 * math.log(2), dtype=torch.float32)
    logit = torch.nextafter(top - below, torch.tensor(sign * math.inf))
    scale = torch.tensor(masses.LOG2_E)
    for _ in range(2):  # a quick quotient is off by two units
        scale = torch.nextafter(scale, torch.tensor(-sign * math.inf))
    exponent = (logit - top) * scale
    power = torch.exp2(exponent.double()) * (1 + sign * 2.0**-22)
    quick = 1 + number * float(power) * (1 + sign * 20 * 2.0**-24)
    logits = torch.stack([top, top - below])
    first, other = (int(mass) for mass in masses.masses(logits, top, torch.tensor(1.0)))
    total = first + number * other
    error = abs(quick * masses.TOP_MASS - total) / total
    assert masses.ABOUT_ERROR / 4 < error < masses.ABOUT_ERROR
