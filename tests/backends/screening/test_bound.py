"""The proved bounds hold, and where they are tight a bound that is a little too small is seen."""

from __future__ import annotations

import itertools
import math
import platform
import random
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from numba.core.codegen import get_host_cpu_features

from tests.support.commands import run_command
from tests.support.native import (
    Bounds,
    multiply_bytes,
    multiply_tiles,
    noise_of_ids,
    noise_of_rows,
)
from tests.support.screening import HEADS, PASSES, Problem, controlled, problem, requests
from tests.support.tiers import long
from tpsample import SamplingBatch, noise
from tpsample.backends.numba_.kernels.int8 import WIDE
from tpsample.backends.numba_.kernels.noise import BITS_SCALE, NOISE_TOP, draws_of
from tpsample.backends.numba_.kernels.tile_dots import HAS_TILES
from tpsample.backends.numba_.kernels.vectors import LANES, PADDING
from tpsample.backends.screening import bound
from tpsample.backends.screening.int8_copy import BLOCK, GROUP, NUMBERS, OFFSET, Int8Copy, limbs
from tpsample.core.exact_sum import exact_products
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import Head, logits_tile, score_tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bounds_of(case: Problem, which: str) -> Bounds:
    b, v = len(case.hidden_states), len(case.weight)
    return Bounds(case, SamplingBatch.from_params(requests(b), vocab_size=v), which)


def exact(case: Problem) -> torch.Tensor:
    """The definition's products, in float64."""
    return exact_products(case.hidden_states.double(), case.weight.double()).double()


def whole_numbers(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states in whole numbers, [B, D], and their units, [B, 1], as a CPU has them."""
    size, norm = hidden.abs(), hidden.norm(dim=1, keepdim=True)
    share = torch.nn.functional.pad((size / norm).nan_to_num(0.0), (0, -size.shape[1] % GROUP))
    share = share.view(len(size), -1, GROUP).amax(dim=(0, 2))
    is_wide = torch.zeros(len(share), dtype=torch.bool)
    is_wide[share.topk(len(share) // WIDE).indices] = True
    others = size.masked_fill(is_wide.repeat_interleave(GROUP)[: size.shape[1]], 0.0)
    most, total = others.amax(dim=1, keepdim=True) / 127, size.sum(dim=1, keepdim=True) / 2**23
    unit = most.maximum(size.amax(dim=1, keepdim=True) / (127 * 256)).maximum(total).float()
    unit = unit.where(unit >= bound.TINY, 1.0).double()
    return (hidden / unit).round(), unit


def twin(case: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of the 8-bit pass and their bounds, by the formulas of `int8_copy`."""
    copy, hidden = Int8Copy(case.weight), case.hidden_states.double()
    (whole, unit), norm = whole_numbers(hidden), hidden.norm(dim=1, keepdim=True)
    product = (whole @ copy.quantised.double().T * unit * copy.scale.double()).float()
    lost = (hidden - unit * whole).norm(dim=1, keepdim=True)
    lost += bound.ROUNDING * (norm + lost)
    of_norm = (lost + bound.DEFINITION_ERROR * norm) * copy.norm.double()
    error = (norm + lost) * copy.residual_norm.double() + of_norm + flushed(case)
    return product, bound.round_up(error)


def flushed(case: Problem) -> float:
    """Return how much of a product may be lost where numbers are subnormal."""
    norms = [each.double().norm(dim=1).amax().item() for each in (case.weight, case.hidden_states)]
    return bound.TINY * case.weight.shape[1] * (3 + sum(norms))


def excess(case: Problem) -> torch.Tensor:
    """How far every product of the twin is off, over its bound; above 1 is a violation."""
    product, error = twin(case)
    return (product.double() - exact(case)).abs() / error.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", HEADS)
def test_products_are_within_the_bound(name, dtype):
    for v, b, d, seed in ((1000, 12, 128, 1), (300, 5, 33, 2), (200, 1, 1, 3), (70, 2, 1312, 4)):
        case = problem(name, v, b, d, seed).to(dtype)
        if dtype == torch.float16:  # fp32 holds every number of it, and only the reading differs
            case = case.to(torch.float32)
        assert (excess(case) <= 1).all()
        for which in PASSES:
            found = bounds_of(case, which)
            assert (exact(case) <= found.end).all()
            assert (exact(case) >= 2 * found.product.double() - found.end.double()).all()
            if which == "int8":  # nothing but the order of float64 sums differs
                product, error = twin(case)
                assert torch.allclose(found.product, product, rtol=1e-6, atol=1e-37)
                off = (found.end - (product + error)).abs()
                assert (off <= 4e-6 * (product.abs() + error) + flushed(case)).all()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("head", [Head(), Head(0.3), Head(1.0, 4.0), Head(3.0, 30.0)], ids=str)
def test_scores_are_below_their_upper_bounds(head, which):
    pick, used = random.Random(5), 0
    for name, with_controls in itertools.product(HEADS, (False, True)):
        case = replace(problem(name, 200, 6, 48, seed=5), head=head)
        if with_controls:
            bias = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 50
            case = replace(case, bias=bias)
        tokens = [[pick.randrange(200) for _ in range(30)] for _ in range(6)]
        params = controlled(6, 200, pick) if with_controls else requests(6)
        batch = SamplingBatch.from_params(params, vocab_size=200, output_token_ids=tokens)
        found = Bounds(case, batch, which)
        step = found.step
        logits = logits_tile(step.hidden_double, case.weight, case.bias, head)
        if step.controls is not None:
            logits = step.controls.apply(logits, 0)
            used += 1
        scores = score_tile(logits, 0, step.noise, 0)
        assert (found.upper >= scores).all()
    assert used == len(HEADS)


# -- where the bounds are tight ----------------------------------------------------------------


def parallel() -> Problem:
    """Hidden states that lie along the residual of a weight row, exactly.

    Every weight is a multiple of 1/4 quantum off its quantised value. So the residual has entries
    of ±1/4, which the limbs of the hidden states hold exactly.
    """
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (64,), generator=generator) * 2.0 - 1
    whole = torch.randint(-120, 121, (64,), generator=generator).float()
    weight = whole + sign / 4
    weight[0], sign[0] = 127.0, 0.0  # the largest: the scale is 1, and its own residual 0
    return Problem(weight.unsqueeze(0), 32512.0 * sign.unsqueeze(0))


def test_the_8_bit_bound_is_tight():
    """So 5 % less would be too little."""
    case = parallel()
    worst = excess(case).max()
    assert 0.96 < worst <= 1
    found = bounds_of(case, "int8")
    error = found.end.double() - found.product
    assert ((found.product.double() - exact(case)).abs() > 0.95 * error).any()


def test_the_limbs_are_exact_integers():
    hidden = torch.cat([torch.randn(40, 33, dtype=torch.float64), torch.zeros(1, 33)])
    high, low, unit = limbs(hidden)
    whole = 256 * high.long() + low.long()
    assert high.abs().max() <= 127
    assert (hidden - unit * whole).abs().le(0.5 * unit * (1 + 1e-9)).all()
    assert torch.equal(unit, unit.float().double())
    assert (whole[-1] == 0).all()
    assert whole.abs().amax(dim=1)[:-1].min() > 32000


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_norms_are_rounded_up(dtype):
    """Held against exact rational numbers: norm² in fp32 is never less than the sum of squares."""
    weight = torch.cat([problem(name, 3, 1, 21).to(dtype).weight for name in HEADS])
    copy = Int8Copy(weight)
    for row, values in enumerate(weight.double().tolist()):
        scale = Fraction(copy.scale[row].item())
        exact = [Fraction(value) for value in values]
        lost = [w - scale * q for w, q in zip(exact, copy.quantised[row].tolist(), strict=True)]
        assert Fraction(copy.norm[row].item()) ** 2 >= sum(w * w for w in exact)
        residual, squared = Fraction(copy.residual_norm[row].item()), sum(x * x for x in lost)
        assert residual**2 >= squared
        assert residual <= math.sqrt(squared) * (1 + 1e-6) + 1e-37


def test_the_memory_of_a_copy_is_what_it_says():
    copy = Int8Copy(torch.randn(50, 21))
    tensors = (copy.quantised, copy.scale, copy.norm, copy.residual_norm)
    assert sum(each.nbytes for each in tensors) == 50 * (21 + NUMBERS)


@pytest.mark.parametrize(("ids", "columns", "lane"), [(1, 1, 0), (200, 21, 63), (3000, 640, 5)])
def test_a_copy_in_blocks_has_the_numbers_of_the_rows(ids, columns, lane):
    weight = torch.randn(ids, columns)
    rows, copy = Int8Copy(weight), Int8Copy(weight, lane=lane)
    lanes = copy.quantised.transpose(1, 2).flatten(2).flatten(0, 1).int() - OFFSET
    inside = slice(lane, lane + ids)
    assert torch.equal(lanes[inside, :columns], rows.quantised.int())
    assert len(lanes) % BLOCK == 0 and lanes.shape[1] == -(-columns // GROUP) * GROUP
    lanes[inside, :columns] = 0
    assert not lanes.any()
    for name, outside in (("scale", 1), ("norm", 0), ("residual_norm", 0)):
        found = getattr(copy, name).clone()
        assert torch.equal(found[inside], getattr(rows, name))
        found[inside] = outside
        assert (found == outside).all()


def test_products_of_bytes_are_those_of_whole_numbers():
    multiply_bytes()


@pytest.mark.parametrize(
    ("without", "check"),
    [
        ("avx512", "multiply_bytes"),
        *long(("avx512vnni", "multiply_bytes")),
        ("amx", "multiply_tiles"),
    ],
)
def test_processors_without_an_instruction_do_without(without, check):
    features = get_host_cpu_features().split(",")
    less = [f"-{each[1:]}" if each[1:].startswith(without) else each for each in features]
    code = f"from tests.support.native import *; assert not {check}()"
    done = run_command(sys.executable, "-c", code, env={"NUMBA_CPU_FEATURES": ",".join(less)})
    assert done.returncode == 0, done.stderr


def test_products_of_tiles_are_those_of_whole_numbers():
    """torch has products of tiles as well, and finds them as it left them."""
    a, b = torch.randn(2, 64, 64).bfloat16()
    before = a @ b
    assert multiply_tiles() == (HAS_TILES and torch.cpu._is_amx_tile_supported())
    assert torch.equal(a @ b, before)


REFUSED = """
import ctypes, struct
code = (0x20, 0, 0, 0), (0x15, 0, 1, 158), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
from tests.support.native import *
assert not multiply_tiles()
"""
"""A filter of system calls, by which Linux refuses arch_prctl, number 158, with EPERM."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number is that of x86-64")
def test_a_process_that_is_refused_tiles_does_without():
    """Code that other processes compiled, with tiles, asks again."""
    multiply_tiles()
    done = run_command(sys.executable, "-c", REFUSED)
    assert done.returncode == 0, done.stderr


# -- the formulas ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_fp32_bound_is_its_formula(rows):
    """γ cannot be reached by real sums, so it is held against rational numbers."""
    case = problem("normal", 64, rows, 96).to(torch.bfloat16)
    found = bounds_of(case, "fp32")
    unit = Fraction(1, 2**24)
    additions = 96 if rows == 1 else 96 // LANES + LANES.bit_length() - 1 + 1
    if rows == 8 and multiply_tiles():
        additions = max(additions, PADDING // 2 + 1 + 96 // PADDING + 1)
    spread = (additions + 4) * unit
    gamma = spread / (1 - spread) + unit
    norms = [
        [sum(Fraction(x) ** 2 for x in values) for values in each.tolist()]
        for each in (case.hidden_states, case.weight)
    ]
    for row, squares in enumerate(norms[0]):
        needed = gamma**2 * squares * max(norms[1])  # one block of ids
        ratio = Fraction(found.error[row, 0].item()) ** 2 / needed
        assert 1 < ratio < 1 + Fraction(1, 10**4)
        assert (found.error[row] == found.error[row, 0]).all()


def test_rounding_up():
    values = torch.cat([torch.rand(1000, dtype=torch.float64) * 2.0**e for e in range(-160, 120)])
    rounded = bound.round_up(values)
    assert (rounded.double() >= values * (1 + 2.0**-23)).all()
    assert (rounded.double() <= values * (1 + 2.0**-21) + 2.0**-125).all()


def noise_gap(words: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """How far the bound of the noise is above it."""
    bits = words.float().view(torch.int32).double()
    return (
        float(NOISE_TOP) - bits * float(BITS_SCALE) + noise.log2_exponential(words, mixed).double()
    )


def test_the_noise_is_below_its_bound():
    edges = torch.cat([2**e + torch.arange(-300, 300) for e in range(1, 33)])
    words = torch.cat([edges, torch.randint(0, 2**32, (200_000,)), torch.arange(2000)])
    words = words.clamp(0, 2**32 - 1)
    for low in (0, 0xFFFF):
        gap = noise_gap(words, words ^ low)
        assert gap.min() >= 0
        # Small noise, and noise at large u, is bounded less well; the largest is bounded best.
        assert gap[(words > 2**16) & (words < 2**20)].max() < 0.09


def test_the_margin_of_the_noise_is_used():
    """The bound leaves less than 5e-5 where a word is a power of two, so it may not shrink."""
    words = 2 ** torch.arange(6, 15)
    assert (noise_gap(words, words) < 5e-5).all()


def test_native_noise_is_the_definitions():
    generator = torch.Generator().manual_seed(10)
    seeds, places = torch.randint(-(2**63), 2**63 - 1, (2, 30), generator=generator)
    seeds[:3], places[:3] = torch.tensor([0, -1, 2**32]), torch.tensor([-(2**63), 2**40, 0])
    heat = torch.tensor([1.0, 0.0, 0.7, 1e-7, 3e-5] * 6)
    rows = RowNoise(heat, seeds, places, 3)
    made = noise_of_rows(draws_of(rows), np.arange(30))
    assert torch.equal(torch.from_numpy(made.scale), rows.scale.squeeze(1))
    assert torch.equal(torch.from_numpy(made.random), rows.random.squeeze(1).float())
    found = np.empty(501, np.float32)
    for sample, first_id in ((0, 0), (1, 3), (2, 1_000_001)):
        expected = noise.tile_noise(rows.streams[sample], first_id, 501)
        for row in range(30):
            noise_of_ids(first_id, made.streams[row, sample], found)
            assert torch.equal(torch.from_numpy(found), expected[row])
