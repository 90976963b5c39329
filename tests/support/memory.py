"""How much a step allocates at once."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class Largest(TorchFunctionMode):
    """The most elements in the storage of any tensor that a call into torch returned."""

    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(leaf, torch.Tensor):
                with torch._C.DisableTorchFunction():
                    num_bytes = leaf.untyped_storage().nbytes()
                    self.elements = max(self.elements, num_bytes // leaf.element_size())
        return result
