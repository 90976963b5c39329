"""A reshape that may reorder numbers is asked for in the form that this Triton takes."""

from pathlib import Path

import torch
import triton
import triton.language as tl

from tpsample.backends.triton_.kernels import reorder
from tpsample.backends.triton_.kernels.order import by_thread


def test_no_kernel_asks_for_what_triton_3_10_takes_away():
    files = Path(reorder.__file__).parent.glob("*.py")
    assert [file.name for file in files if "can_reorder" in file.read_text()] == ["reorder.py"]


def test_a_reshape_is_asked_to_reorder_where_it_takes_that():
    assert reorder.may_reorder(lambda values, shape, can_reorder: values)
    assert not reorder.may_reorder(lambda values, shape: values)


@triton.jit
def probe(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 8)
    tl.store(y_ptr + places, by_thread(tl.load(x_ptr + offs)))


def test_where_no_reshape_may_every_number_is_in_one_sum():
    """The interpreter has no threads, so its sums are in the order of the numbers."""
    for block in (8, 64, 1024):
        bits = 2 ** torch.arange(block).remainder(53)
        sums = torch.zeros(block // 8, dtype=torch.int64)
        probe[(1,)](bits, sums, BLOCK=block)
        expected = bits.view(2, block // 8, 4).sum(dim=(0, 2))
        assert torch.equal(sums, expected) and sums.sum() == bits.sum()
