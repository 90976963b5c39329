"""Logits of single tokens, [T], and their way back to hidden states and weight rows.

    logit_t = soft-cap(scale · h_row(t) · w_id(t))        as a step of a sampler computes it

On a CPU the product is the exact dot product, rounded once to fp32, as in every backend. Weights in
float64 are not rounded, so that `torch.autograd.gradcheck` can move them by little.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpsample.core.exact_sum import MARGIN, exact_sums
from tpsample.core.score import Head, head_logits, logits_tile

AT_ONCE = 2**18
"""Products that are computed at once: 2 MB of float64, in up to five tensors."""


def pair_products(
    hidden_states: Tensor, rows: Tensor, weight: Tensor, weight_rows: Tensor
) -> Tensor:
    """Return the products [T] of pairs of a row of hidden states and a row of the weight.

    Args:
        hidden_states: [N, D].
        rows, weight_rows: int64 [T].
        weight: [V_local, D].

    Returns:
        fp32; float64 of a weight in float64. An overflow is NaN, because it is no logit.
    """
    products = hidden_states.new_empty(len(rows), dtype=_dtype_of(weight))
    for part in parts(len(rows), weight.shape[1]):
        left = hidden_states[rows[part]].double()
        right = weight[weight_rows[part]].double()
        products[part] = _dots(left, right, products.dtype)
    return products.masked_fill_(products == torch.inf, torch.nan)


def tile_products(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Return products [C, V_local] with all rows of a weight, as `pair_products`."""
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


def add_to_hidden(
    of_hidden: Tensor, grads: Tensor, rows: Tensor, weight: Tensor, weight_rows: Tensor
) -> None:
    """Add g_t · w_id(t) to row(t) of `of_hidden`, float64 [N, D].

    Args:
        grads: float64 [T], gradients of the products.
    """
    for part in parts(len(rows), weight.shape[1]):
        factors = grads[part].unsqueeze(1)
        of_hidden.index_add_(0, rows[part], factors * weight[weight_rows[part]].double())


def add_to_weight(
    of_weight: Tensor, grads: Tensor, hidden_states: Tensor, rows: Tensor, weight_index: Tensor
) -> None:
    """Add g_t · h_row(t) to row i(t) of `of_weight`, float64 [rows, D]; see `add_to_hidden`."""
    for part in parts(len(rows), hidden_states.shape[1]):
        factors = grads[part].unsqueeze(1)
        of_weight.index_add_(0, weight_index[part], factors * hidden_states[rows[part]].double())


def parts(count: int, hidden_size: int, at_once: int = 0) -> Iterator[slice]:
    """Yield slices of `count` rows of so many numbers: one row each, or more.

    Args:
        at_once: most numbers of several rows; 0 for AT_ONCE.
    """
    step = max(1, (at_once or AT_ONCE) // max(1, hidden_size))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def _dtype_of(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _dots(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot product of each pair of rows of float64 [P, D]."""
    products = left * right
    total = products.sum(dim=1)
    rounded = total.to(dtype)
    if dtype == torch.float64 or not total.is_cpu:
        return rounded
    error = left.norm(dim=1) * right.norm(dim=1) * (left.shape[1] * MARGIN)
    undecided = ((total - error).float() != (total + error).float()) & total.isfinite()
    rounded[undecided] = exact_sums(products[undecided])
    return rounded
