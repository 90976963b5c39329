"""Logits of kept ids out of their products, and the way back.

logit = soft-cap(scale · h_row · w_id)                 as a step of a sampler computes it
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.torch_.pairs import slices
from tpsample.backends.torch_.passes import tile_elements
from tpsample.core.score import Head, head_logits, logits_tile


def sums_in(numbers: Tensor) -> torch.dtype:
    """Return the dtype in which products with all rows of a weight are summed.

    It is float64 on a CPU, and fp32 on GPUs, where that of inference has next to no float64.
    """
    exact = numbers.is_cpu or numbers.dtype == torch.float64
    return torch.float64 if exact else torch.float32


def tile_products(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Return products [C, V_local] with all rows of a weight.

    On a CPU each is that of `pair_products`. On a GPU it is a sum in fp32 as torch.matmul makes it.
    """
    dtype = sums_in(weight)
    states = hidden_states.to(dtype)
    if weight.dtype == torch.float64:
        return states @ weight.T
    if dtype == torch.float64:
        return logits_tile(states, weight, None, Head())
    products = states.new_empty(len(states), len(weight))
    for part in slices(len(weight), weight.shape[1], tile_elements(weight.device)):
        torch.matmul(states, weight[part].float().T, out=products[:, part])
    return products.masked_fill_(products == torch.inf, torch.nan)


def logits_of(product: Tensor, head: Head) -> Tensor:
    """Return the logits of products of any shape, as a step makes them."""
    if product.dtype == torch.float32:
        return head_logits(product, None, head)
    scaled, cap = product * head.logit_scale, head.logit_softcap
    return scaled if cap is None else torch.tanh(scaled / cap) * cap


def slopes(product: Tensor, head: Head) -> Tensor:
    """Return the derivative of logits by their products, float64."""
    scale = torch.full_like(product, head.logit_scale, dtype=torch.float64)
    if head.logit_softcap is None:
        return scale
    return scale / torch.cosh(product.double() * head.logit_scale / head.logit_softcap) ** 2
