"""Products from 8-bit limbs round to fp32 as the exact sums do.

Where the processor has no tiles, all of them are made in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from tests.backends.numba_.test_float64_products import products
from tests.support.screening import HEADS, problem
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.inputs import take_rows
from tpsample.backends.numba_.kernels.limb_products import FEW_ROWS, limbs_of
from tpsample.backends.numba_.kernels.tile_dots import may_use_tiles
from tpsample.core.exact_sum import exact_products

SIXTEEN_BITS = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


@njit
def number_of_limbs(hidden):
    """Return how many limbs rows have, and whether this process has tiles."""
    return len(limbs_of(take_rows(hidden, np.arange(len(hidden))), True).rows), may_use_tiles()


def check(hidden: Tensor, weight: Tensor, limbs: int | None = None) -> np.ndarray:
    """Compare products of whole blocks and of parts; return what is proved of whole ones."""
    found, tiles = number_of_limbs(array_of(hidden))
    assert limbs is None or found == (limbs if tiles else 0)
    expected = exact_products(hidden.double(), weight.double())
    expected[expected == torch.inf] = torch.nan  # an overflow is no logit
    for first_id in (100, 64, 0):
        _, _, proved, logits = products(hidden, weight, first_id)
        torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=0, equal_nan=True)
    return proved


@SIXTEEN_BITS
@pytest.mark.parametrize("name", HEADS)
def test_they_are_those_of_hostile_heads(name, dtype):
    for v, b, d, seed in ((200, 9, 64, 1), (150, 20, 33, 2), (130, 34, 1312, 3)):
        case = problem(name, v, b, d, seed).to(dtype)
        check(case.hidden_states, case.weight)


@SIXTEEN_BITS
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tiny", [1, -1])
def test_a_sum_beside_a_midpoint_is_rounded_once(tiny, sign, dtype):
    """The rest, 2^-14, is less than float64 can tell beside 2^44. With 2^20 that is a midpoint of
    fp32 numbers."""
    hidden, weight, more = torch.zeros(12, 70), torch.zeros(128, 70), 1 + 2.0**-7
    places = [3, 20, 41, 69]
    weight[:, places] = torch.tensor([2.0**14, 2.0**2, 2.0**-8 * more, 2.0**-8])
    hidden[:, places] = torch.tensor([2.0**30, 2.0**18, tiny * more, -tiny]) * sign
    check(hidden, weight.to(dtype), 5)


@SIXTEEN_BITS
def test_ids_that_limbs_do_not_hold_are_multiplied_in_float64(dtype):
    """A few of a block, and then most of it; and weights that are not finite."""
    pick = torch.Generator().manual_seed(0)
    hidden = torch.randint(-9, 10, (12, 40), generator=pick).to(dtype)
    for others in (1, 40):
        weight = torch.randint(-9, 10, (192, 40), generator=pick) * 2.0**8
        weight[64 : 64 + others, 5] = 2.0**-24
        proved = check(hidden, weight.to(dtype), limbs=4)
        assert proved[:, :64].all() and proved[:, 128:].all()
        for other in (torch.inf, -torch.inf, torch.nan):
            weight[70, 7] = other
            check(hidden, weight.to(dtype))


@pytest.mark.parametrize(
    ("least", "rows", "limbs"),
    [
        (2.0**-22, 12, 4),
        (2.0**-23, 12, 5),
        (2.0**-30, 12, 5),
        (2.0**-31, 12, 0),
        (1.0, FEW_ROWS, 0),
        (torch.inf, 12, 0),
        (torch.nan, 12, 0),
    ],
)
def test_rows_have_as_many_limbs_as_hold_them(least, rows, limbs):
    hidden = torch.ones(rows, 50) + 2.0**-7
    hidden[rows // 2, 17] = least
    check(hidden.bfloat16(), torch.randn(130, 50).bfloat16(), limbs)


def test_rows_of_zeros_and_of_fp32_numbers():
    zeros, weight = torch.zeros(10, 64), torch.randn(64, 64).bfloat16()
    check(zeros, weight, 4)
    check(torch.ones(10, 64) + 2.0**-22, weight, 4)
    check(torch.linspace(1e-6, 1, 640).view(10, 64), weight, 0)


@pytest.mark.parametrize("other", [torch.inf, torch.nan])
def test_what_is_not_finite_alone_is_not_held(other):
    weight, hidden = torch.ones(128, 64), torch.ones(10, 64)
    weight[::16], hidden[3] = other, other
    check(torch.ones(10, 64), weight.bfloat16(), 4)
    check(hidden, weight.bfloat16(), 0)
