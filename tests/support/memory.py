"""How much a step allocates at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from tpsample import LMHeadSampler


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


def cost_of(sampler: LMHeadSampler, call: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes of integers that a call sends, and the elements of its largest tensor."""
    before = sampler.ranks.bytes_sent
    with Largest() as largest:
        call()
    return sampler.ranks.bytes_sent - before, largest.elements
