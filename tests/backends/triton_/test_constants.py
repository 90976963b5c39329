"""Globals of kernels, which Triton compares in every launch."""

import importlib
import pkgutil

import triton.language as tl

from tpsample.backends.triton_ import kernels
from tpsample.backends.triton_.kernels.constant import Constant


def test_every_global_number_of_a_kernel_answers_at_once():
    found = {
        f"{module.name}.{name}": type(value)
        for module in pkgutil.iter_modules(kernels.__path__)
        for name, value in vars(
            importlib.import_module(f"{kernels.__name__}.{module.name}")
        ).items()
        if isinstance(value, tl.constexpr)
    }
    assert len(found) > 50 and set(found.values()) == {Constant}


def test_a_number_that_changed_is_another():
    number = 1 << 40
    assert (Constant(number) != Constant(1 << 40)) is False
    assert (Constant(number) != Constant(3)) is True
    assert (Constant(number) != number, Constant(3) != number) == (False, True)
