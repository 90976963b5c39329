"""Float64 products are off by no more than their bound says, which says 0 where it proves so."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiers import thinned
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.compiling import F32, F64, jit
from tpsample.backends.numba_.kernels.inputs import block_at, blocks_of, take_rows, weight_of
from tpsample.backends.numba_.kernels.products import (
    float64_products,
    products_of,
    round_products,
)
from tpsample.backends.screening.int8_copy import BLOCK
from tpsample.core.exact_sum import exact_products

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:]
)
ROWS = pytest.mark.parametrize("rows", [1, 3])


@jit(entry=True)
def find_products(weight, hidden, values, errors, proved, logits):
    """Find the products of every block, the bounds of their errors, and the logits."""
    rows, of_block = take_rows(hidden, np.arange(len(hidden))), np.empty(BLOCK, F32)
    products = products_of(rows, F64)
    for n in range(blocks_of(weight)):
        block = block_at(weight, n)
        float64_products(weight, block, rows, products)
        for i in range(len(hidden)):
            round_products(weight, block, rows, i, products, of_block)
            for k in range(block.count):
                v, j = block.local + k, block.lane + k
                values[i, v], logits[i, v] = products.values[i, j], of_block[j]
                errors[i, v], proved[i, v] = rows.norms[i] * products.squares[j], products.proved[i]


def products(hidden: Tensor, weight: Tensor, first_id: int = 0) -> Any:
    """Return float64 products, the bounds of their errors, whether proved, and logits, [B, V]."""
    shape = len(hidden), len(weight)
    found = np.empty(shape), np.empty(shape), np.empty(shape, np.bool_), np.empty(shape, F32)
    find_products(weight_of(weight, first_id, 0, len(weight)), array_of(hidden), *found)
    return found


def exact(hidden: Tensor, weight: Tensor) -> list[list[Fraction]]:
    """Return the products as rational numbers."""
    rows, columns = (
        [[Fraction(x) for x in values] for values in each.tolist()] for each in (hidden, weight)
    )
    return [[sum(map(Fraction.__mul__, row, w), Fraction(0)) for w in columns] for row in rows]


@pytest.mark.parametrize(
    ("scale", "size", "rows", "dtype"),
    thinned(
        [1.0, 3e-5, 1e-39, 1e20, 1e38],
        [1, 37, 96],
        [1, 3],
        [torch.bfloat16, torch.float16, torch.float32],
        one_in=3,
        also=[(1.0, 37, rows, torch.float16) for rows in (1, 3)],
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_sums_are_off_by_no_more_than_their_bound(scale, size, rows, dtype):
    """Weights may be subnormal, or have squares that no fp32 number holds."""
    g = torch.Generator().manual_seed(size)
    scale = min(max(scale, 3e-7), 1e4) if dtype == torch.float16 else scale
    wide = (torch.randn(70, size + 3, generator=g).clamp(-3, 3) * scale).to(dtype)
    hidden = torch.randn(rows, size, generator=g)
    for weight in (wide[:, :size].contiguous(), wide[:, 1 : size + 1]):
        values, errors, proved, logits = products(hidden, weight, first_id=8)
        expected = exact_products(hidden.double(), weight.double())
        expected[expected == math.inf] = math.nan  # an overflow is no logit
        torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=0, equal_nan=True)
        needed = size * 2.0**-53 * hidden.double().norm(dim=1)[:, None]
        needed = needed * weight.double().abs().amax(dim=1) * math.sqrt(size)
        for i, row in enumerate(exact(hidden, weight)):
            for j, product in enumerate(row):
                off = abs(Fraction(values[i, j]) - product)
                assert off <= errors[i, j] and not (off and proved[i, j])
                if errors[i, j]:
                    assert errors[i, j] >= needed[i, j]
                else:
                    assert off == 0


@DTYPES
@ROWS
@pytest.mark.parametrize("size", [2, 37])
def test_one_small_weight_takes_the_proof_away(size, rows, dtype):
    """Wherever it lies among three ids, because its sum with the others is no float64 number."""
    high, low = (2.0**15, 2.0**-24) if dtype == torch.float16 else (2.0**40, 2.0**-20)
    for place in range(3 * size):
        id_, column = divmod(place, size)
        hidden, weight = torch.full((rows, size), 2.0**20), torch.full((3, size), high)
        assert products(hidden, weight.to(dtype))[2].all()
        hidden[:, column], weight[id_, column] = 1.0, low
        values, errors, proved, _ = products(hidden, weight.to(dtype))
        ((product,),) = exact(hidden[:1], weight[id_ : id_ + 1])
        off = abs(Fraction(values[0, id_]) - product)
        assert 0 < off <= min(errors[:, id_]) and not proved.any()


@DTYPES
@ROWS
@pytest.mark.parametrize("other", [math.inf, -math.inf, math.nan])
def test_a_weight_that_is_not_finite_takes_the_proof_of_its_neighbours(other, rows, dtype):
    """The sum of one is beside a midpoint of fp32 numbers, by less than float64 can tell; without
    it and the weight that is not finite, all sums of 16-bit weights are proved."""
    hidden, small = torch.tensor([[2.0**24, 1.0, 2.0**-10]] * rows), 2.0**-24
    assert products(hidden, torch.ones(20, 3).to(dtype))[2].all() == (dtype != torch.float32)
    expected = np.full((rows, 20), 2.0**24 + 2, F32)
    expected[:, 11] = other if other < 0 else math.nan
    for neighbour in {*range(20)} - {11}:
        weight = torch.ones(20, 3)
        weight[11, 1], weight[neighbour, 2] = other, small
        found = products(hidden, weight.to(dtype))[3]
        assert np.array_equal(found, expected, equal_nan=True), neighbour


@ROWS
def test_a_proof_holds_up_to_its_limit_and_no_further(rows):
    """All weights but one are of one size, so that no bound on a norm may be smaller than theirs.

    Bounds are rounded up by 1 %.
    """
    hidden, limit = torch.ones(rows, 64), 2.0**53 * 2.0**-14
    for size in (2.0 ** (k / 8) for k in range(8 * 26, 8 * 40)):
        weight = torch.full((70, 64), size).bfloat16()
        of_sizes = 64 * weight[0, 0].item()
        weight[::2] *= -1
        weight[:, 7] = 1.0
        _, errors, proved, _ = products(hidden, weight)
        assert not proved.any() or of_sizes < limit
        assert proved.all() or of_sizes * 1.02 > limit
        assert ((errors == 0) == proved).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("state", [1.0, -(2.0**-149), 3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [1, 2])
def test_every_weight_of_16_bits_is_multiplied_exactly(size, state, dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weight, hidden = numbers.reshape(-1, size), torch.full((1, size), state)
    hidden[0, 1:] = 1.0
    values, *_ = products(hidden, weight)
    expected = (hidden.double() * weight.double()).sum(dim=1)
    torch.testing.assert_close(torch.tensor(values[0]), expected, rtol=0, atol=0, equal_nan=True)
