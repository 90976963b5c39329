"""The logit of a CPU is the exact dot product rounded once, in PyTorch and in native kernels."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.screening import Problem, backends, words
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.compiling import jit
from tpsample.backends.numba_.kernels.numbers import exact_dot
from tpsample.core.exact_sum import exact_products, exact_sums

V, D = 370, 96


@jit(entry=True)
def dot_at(weight, first, hidden):
    """Call `exact_dot`, as kernels do."""
    return exact_dot(weight, first, hidden)


def nearest(exact: Fraction) -> np.float32:
    """Return the nearest fp32 number, of two the even one."""
    near = np.float32(float(exact))
    around = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
    odd = [int(each.view(np.uint32)) & 1 for each in around]
    return min(
        zip(around, odd, strict=True), key=lambda x: (abs(Fraction(float(x[0])) - exact), x[1])
    )[0]


def both(hidden: Tensor, weight: Tensor) -> list[float]:
    """The product of fp32 [D] and [D] in both ways."""
    defined = exact_products(hidden.double().unsqueeze(0), weight.double().unsqueeze(0))
    assert defined.dtype == torch.float32
    flat = array_of(weight)
    return [defined.item(), float(dot_at(flat, 0, hidden.numpy()))]


def cancelling(rows: int) -> Problem:
    """Products of ±1.5e7 whose sum is below 100."""
    g = torch.Generator().manual_seed(1)
    half = torch.randn(V, D // 2, generator=g) * 5000
    weight = torch.cat([half, -half + torch.randn(V, D // 2, generator=g) * 1e-3], dim=1)
    hidden = torch.randn(rows, D // 2, generator=g) * 3000
    return Problem(weight, torch.cat([hidden, hidden], dim=1))


@pytest.mark.parametrize("low", [0.0, 2.0**-60, -(2.0**-60), 2.0**-140, -(2.0**-140)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("base", [1.0, 1 + 2.0**-23, 2 - 2.0**-23])
def test_a_sum_beside_a_midpoint_is_rounded_to_its_side(base, sign, low):
    """A number far below the last bit of float64 says on which side of a midpoint a sum lies."""
    terms = [sign * base, 2.0**-12, low, 2.0**30, -(2.0**30)]
    others = [1.0, sign * 2.0**-12, 1.0, 1.0, 1.0]
    hidden, weight = torch.tensor(terms), torch.tensor(others)
    exact = sum(Fraction(a) * Fraction(b) for a, b in zip(terms, others, strict=True))
    assert both(hidden, weight) == [float(nearest(exact))] * 2
    turned = torch.arange(4, -1, -1)
    assert both(hidden[turned], weight[turned]) == [float(nearest(exact))] * 2


@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e-24])
def test_sums_are_rounded_once(scale):
    """Also to a subnormal number, and where every product cancels but for parts in 1e9."""
    case = cancelling(4)
    hidden, weight = case.hidden_states * scale, case.weight[:60] * scale
    for row in hidden:
        for column in weight:
            pairs = zip(row.tolist(), column.tolist(), strict=True)
            exact = float(nearest(sum(Fraction(a) * Fraction(b) for a, b in pairs)))
            assert both(row, column) == [exact] * 2


def test_a_default_device_enters_no_sum():
    products = torch.ones(2, 3, dtype=torch.float64)
    with torch.device("meta"):
        assert exact_sums(products).tolist() == [3.0, 3.0]


def test_sums_that_are_no_numbers():
    one, huge = torch.ones(3), torch.tensor([3e38, 3e38, -1.0])
    assert both(one, huge) == [torch.inf] * 2
    for value in (torch.inf, -torch.inf):
        assert both(one, torch.tensor([1.0, value, 3e38])) == [value] * 2
    for others in ([torch.inf, -torch.inf, 1.0], [torch.nan, 1.0, 1.0]):
        assert all(found != found for found in both(one, torch.tensor(others)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_of_16_bits_is_read_exactly(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers, one = array_of(every.view(dtype)), np.ones(1, np.float32)
    found = torch.tensor([float(dot_at(numbers, i, one)) for i in range(2**16)])
    assert torch.equal(found.nan_to_num(7e30), every.view(dtype).float().nan_to_num(7e30))


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_logit_depends_on_the_row_and_the_id_alone(rows):
    case = cancelling(64)
    expected = exact_products(case.hidden_states.double(), case.weight.double())[:rows]
    batch = SamplingBatch.from_params([SamplingParams(logprobs=0, seed=3)] * rows, vocab_size=V)
    plain = SamplingBatch.from_params([SamplingParams(seed=3)] * rows, vocab_size=V)
    best = []
    for size, parts in ((V, 1), (37, 1), (V, 10)):
        of_pieces = []
        for start in range(0, V, size):
            shard = VocabShard(start, start + size)
            piece = Problem(case.weight[start : start + size], case.hidden_states[:rows])
            for local in backends(piece, shard):
                arguments = local, piece.hidden_states
                _, logits = words(*arguments, batch, torch.arange(rows), parts=parts)
                assert torch.equal(logits, expected[:, start : start + size])
                found, _ = words(*arguments, plain, torch.arange(rows), parts=parts)
                of_pieces.append(torch.stack(found).amax(dim=0))
        best += [torch.stack(of_pieces[way::2]).amax(dim=0) for way in (0, 1)]
    assert all(torch.equal(each, best[0]) for each in best)
