"""A reshape that may reorder numbers, so that each stays in its thread, as this Triton takes it.

Triton 3.9 warns where a kernel asks `tl.reshape` for it, and Triton 3.10 takes that argument away.
Here the builder below `tl.reshape` is asked, without a warning, as long as it takes the argument.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.core import builtin
from triton.language.semantic import TritonSemantic

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.core.machine import interpreted


def may_reorder(reshape: Callable[..., Any]) -> bool:
    """Return whether a reshape takes the argument that lets it reorder numbers."""
    return "can_reorder" in inspect.signature(reshape).parameters


REORDERS = Constant(not interpreted() and may_reorder(TritonSemantic.reshape))


@builtin
def columns_of_threads(
    values: tl.tensor, rows: tl.constexpr, _semantic: TritonSemantic | None = None
) -> tl.tensor:
    """Return [BLOCK] numbers as [rows, BLOCK / rows], where each column is of one thread."""
    assert _semantic is not None
    shape = [rows.value, values.shape[0].value // rows.value]
    return _semantic.reshape(values, shape, can_reorder=True)
