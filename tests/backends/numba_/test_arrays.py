"""Arrays over tensors share their memory, keep it, and leave its storage resizable."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from tpsample.backends.numba_.kernels.arrays import DTYPES, array_of

CUTS = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:],
    "columns": lambda t: t[:, 2:],
    "transposed": lambda t: t.T,
    "strided": lambda t: t[::2, 3],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_an_array_is_the_tensor(dtype, cut):
    whole = torch.arange(42).remainder(2).to(dtype).view(6, 7)
    part = CUTS[cut](whole)
    array = array_of(part)
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(dtype, dtype)
    assert array.dtype == DTYPES[dtype]
    assert np.array_equal(array, part.clone().view(bits).numpy())
    if array.size:
        array[...] = 0
        assert not part.any()
        assert bool(whole.any()) == (part.numel() < whole.numel())


def test_the_storage_stays_resizable():
    tensor = torch.zeros(5)
    array = array_of(tensor)
    assert tensor.untyped_storage().resizable()
    assert (tensor._version, len(array)) == (0, 5)


def test_an_array_keeps_its_tensor():
    tensor = torch.ones(1000)
    array, alive = array_of(tensor)[3:], weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None
