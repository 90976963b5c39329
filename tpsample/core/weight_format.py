"""The formats of an LM head's weights: which numbers they are, and what multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightFormat:
    """How the numbers of an LM head lie in memory, and how a GPU multiplies them.

    Attributes:
        dtype: of the weights, and of the hidden states.
        fraction_bits: of the significand of a number, behind its leading bit.
        tensor_cores: whether these multiply the numbers. If not, CUDA cores do, one by one in fp32.
    """

    dtype: torch.dtype
    fraction_bits: int
    tensor_cores: bool

    @property
    def name(self) -> str:
        """The name that a file of measured tiles has for it, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


BF16 = WeightFormat(torch.bfloat16, 7, tensor_cores=True)
FP16 = WeightFormat(torch.float16, 10, tensor_cores=True)
FP32 = WeightFormat(torch.float32, 23, tensor_cores=False)
FORMATS = {of.dtype: of for of in (BF16, FP16, FP32)}
"""By dtype."""
