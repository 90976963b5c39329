"""Numbers of interpreted kernels as indices, where Triton 3.6 meets numpy 2.4 or later.

The interpreter keeps a number as an array of one element. Since numpy 2.4 `int` of such an array
raises, and the interpreter calls it in one place, which Triton 3.7 repaired.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import interpreter

REPAIRED = (3, 7)
"""The first Triton that needs nothing."""


def repair() -> None:
    """Let numbers of kernels that are interpreted from now on be indices."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= REPAIRED:
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_repair
