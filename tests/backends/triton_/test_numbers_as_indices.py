"""Interpreted kernels run with every pair of Triton and numpy that is supported."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import triton
from triton.runtime import interpreter

from tpsample.backends.triton_.kernels.interpreter import repair


def test_a_number_is_an_index_where_tritons_own_interpreter_raises(monkeypatch):
    """Triton 3.6 calls `int` of an array with one element, which numpy 2.4 and later refuse."""
    given = {}

    def patch(tensor, scope):
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    repair()
    scope = SimpleNamespace(set_attr=lambda of, name, value: given.update({name: value}))
    interpreter._patch_lang_tensor(None, scope)
    number = SimpleNamespace(handle=SimpleNamespace(data=np.array([3])))
    assert given["__index__"](number) == 3
    assert type(given["__index__"](number)) is int
