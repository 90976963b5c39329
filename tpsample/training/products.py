"""Logits of kept ids out of their products, and the way back.

logit = soft-cap(scale · h_row · w_id)                 as a step of a sampler computes it
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.score import Head, head_logits, logits_tile


def tile_products(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Return products [C, V_local] with all rows of a weight; each is that of `pair_products`."""
    states = hidden_states.double()
    if weight.dtype == torch.float64:
        return states @ weight.T
    return logits_tile(states, weight, None, Head())


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
