"""Products of single pairs and sums of weighted rows: each backend beside plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpsample.backends import room_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = room_of("torch")
GROUPS = [0, 0, 1, 9, 3, 0, 40, 2, 0]
"""Weighted rows of each row."""


@pytest.fixture(params=["triton", "numba"])
def room(request):
    return room_of(request.param)


def _matrix(rows: int, size: int, dtype: torch.dtype, lies: str) -> Tensor:
    """Random numbers that lie in memory as named."""
    numbers = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(dtype)
    if lies == "in columns":
        return numbers.T.contiguous().T
    if lies == "apart":
        apart = numbers.new_full((rows, size + 3), torch.nan)[:, :size]
        return apart.copy_(numbers)
    return numbers


def _index(count: int, rows: int) -> Tensor:
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("lies", ["in rows", "apart", "in columns"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pairs", "size"), [(37, 300), (1, 7), (0, 5)])
def test_products_of_pairs_are_those_of_plain_pytorch(room, pairs, size, dtype, lies):
    left, right = _matrix(5, size, dtype, lies), _matrix(11, size, dtype, lies)
    rows, columns = _index(pairs, 5), _index(pairs, 11)
    expected = PLAIN.pair_products(left, rows, right, columns)
    found = room.pair_products(left, rows, right, columns)
    assert found.dtype == expected.dtype and found.shape == (pairs,)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    exact = (left.double()[rows] * right.double()[columns]).sum(dim=1)
    assert (found.double() - exact).abs().max() <= 2**-24 * exact.abs().max() if pairs else True


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_products_of_pairs_are_exact_on_a_cpu(name):
    """Sums whose terms cancel, as float64 in any order does not have them."""
    states = torch.tensor([[2.0**60, 1.0, -(2.0**60), 2.0**-30]]).repeat(2, 1)
    weight = torch.tensor([[2.0**60, 1.0, 2.0**60, 1.0], [1.0, 1.0, 1.0, 3.0]])
    rows = torch.arange(2)
    assert room_of(name).pair_products(states, rows, weight, rows).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["torch", "triton", "numba"])
def test_a_product_that_overflows_is_no_number(name):
    left, right = torch.tensor([[2.0**100], [1.0]]), torch.tensor([[2.0**100], [-(2.0**100)]])
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    found = room_of(name).pair_products(left, rows, right, columns)
    assert found[0].isnan() and found[1:].tolist() == [-torch.inf, -(2.0**100)]


@pytest.mark.parametrize("lies", ["in rows", "apart", "in columns"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [300, 7])
def test_weighted_rows_are_added_as_by_plain_pytorch(room, size, dtype, lies):
    """A part of the rows: the sums of others are in front of it and behind it."""
    source = _matrix(6, size, dtype, lies)
    ends = torch.tensor([0, *GROUPS]).cumsum(0)
    index = _index(int(ends[-1]), 6)
    factors = torch.randn(len(index), generator=torch.Generator().manual_seed(1)).double()
    for part in (slice(0, len(GROUPS)), slice(4, 7), slice(0, 2), slice(0, 0)):
        its_ends = ends[part.start : part.stop + 1]
        first = torch.arange(float(size)).double().repeat(part.stop - part.start, 1)
        expected, found = first.clone(), first.clone()
        PLAIN.add_weighted_rows(expected, its_ends, factors, source, index)
        room.add_weighted_rows(found, its_ends, factors, source, index)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        counts = torch.tensor(GROUPS[part])
        assert (found != first).any(dim=1).equal(counts > 0)
