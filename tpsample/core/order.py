"""The tokens that a row may draw: one total order, integer masses, and where its filters end.

    order   logit descending, then token id ascending: descending `order_words`
    mass    q_v = rint(2^40 · e^((x_v - max x) / T))    see `tpsample.core.masses`
    min_p   keep v iff x_v >= max x + T · ln(min_p)     float64, rounded up to fp32
    top_k   keep the first k; ties="keep" also what equals the k-th logit
    top_p   keep v iff the mass before v < ceil(top_p · Z); ties="keep" also what equals the logit
            of the last one, because then only greater logits count as before v

Each rule keeps a prefix of the order, so the kept set is the shortest of them. The other rules of
`tpsample.core.rules` keep prefixes, too, and apply before these. The order in which the rules apply
changes only the mass Z that top_p takes a share of (`filter_order`):

    sequential   min_p, then top_k, then top_p      Z is the mass of what both left
    joint        min_p, then top_k beside top_p     Z is the mass of what min_p left
    min_p_last   top_k, then top_p, then min_p      Z is the mass of what top_k left

A masked token (-inf) is never kept, and a row with +inf logits has mass on these alone. Sums of
masses are sums of integers (at most 2^20 · 2^40). So the boundary does not depend on the order of
summation, hence not on ranks, shards or tiles.

"sequential" is vLLM's order, "joint" FlashInfer's and by default SGLang's; min_p comes last in
transformers, llama.cpp, TensorRT-LLM and SGLang. FlashInfer keeps ties, of top_k and of top_p.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.masses import TOP_MASS

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
"""Of the key of an order word, as a radix search takes them: 32 bits are four rounds."""
BIN_BITS = 9
BINS = 1 << BIN_BITS
BINS_PER_Y = BINS / 32
"""Steps of y = (x - max x) / T that a search looks at before it looks at words."""
COUNTED_BINS = 400
"""Tokens of the bins before this one have at least 14 units of mass. So the mass of such a bin
bounds how many tokens it has."""
BIN_MARGIN = 1 / 64
"""Of a bin, more than rounding moves a token: `bins_of` is off by 2^-13 at the most."""

LARGEST = torch.finfo(torch.float32).max
ABOVE_ALL = 1 << word.EPOCH_SHIFT
"""Greater than every order word."""


class Search(NamedTuple):
    """A search for the word at which the weight of descending words of all ranks reaches a limit.

    Attributes:
        prefix: int64 [F], the digits of that word found so far.
        reached: int64 [F], the weight of the words before those of the prefix.
        limit: int64 [F] >= 1; above the row's whole weight it stands for the whole.
    """

    prefix: Tensor
    reached: Tensor
    limit: Tensor


def order_words(logits: Tensor, first_id: int = 0) -> Tensor:
    """Return int64 [..., n] whose descending order is the total order of tokens; NaN is first."""
    ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
    return word.pack(logits, ids)


def below_top(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Return y = (logit - top) / T, float64 <= 0; 0 for the top itself even if it is infinite.

    Args:
        logits: fp32, any shape [F, …].
        top: fp32 largest logit of the row, over all ranks; broadcasts.
        temperature: fp32; broadcasts.
    """
    difference = (logits.double() - top.double()) / temperature.double()
    return torch.where(logits == top, 0.0, difference)


def bins_of(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Return the bins of unmasked logits, int64 [F, n], which never fall along the total order.

    Bin 0 has the largest logits, and the last one all from y = -32 on. Bins narrow a search and
    decide nothing, so how they are rounded changes no result; all ranks round alike.

    Args:
        logits: fp32 [F, n].
        top, temperature: fp32 [F].
    """
    per_logit = (BINS_PER_Y / temperature).clamp_(max=LARGEST).unsqueeze(1)
    steps = (top.unsqueeze(1) - logits) * per_logit
    steps = torch.where(logits < top.unsqueeze(1), steps, 0.0)
    return torch.where(steps < BINS - 1, steps, BINS - 1).to(torch.int64)


@cache
def tokens_per_mass(device: torch.device) -> Tensor:
    """Return fp32 [2, BINS]: at least and at most so many tokens has a bin per unit of its mass.

    A token of bin i has a mass from 2^40 · e^(-(i + 1) / 16) to 2^40 · e^(-i / 16). It may be off
    by half a unit and 2^-10 of the mass, which is more than all roundings. From `COUNTED_BINS` on
    both are 0.
    """
    y = torch.arange(BINS + 1, dtype=torch.float64, device="cpu") / BINS_PER_Y
    edges = TOP_MASS * torch.exp(-y)
    most, least = edges[:-1] * (1 + 2**-10) + 0.5, edges[1:] * (1 - 2**-10) - 0.5
    per_mass = 1 / torch.stack([most, least])
    per_mass[:, COUNTED_BINS:] = 0
    return per_mass.float().to(device)


def least_logit(top: Tensor, temperature: Tensor, y: Tensor) -> Tensor:
    """Return fp32 [F], the least unmasked logit >= max x + T · y, or above; NaN for a NaN.

    Args:
        top: fp32 [F], largest logits over all ranks.
        temperature: fp32 [F], T.
        y: float64 [F] <= 0; -inf excludes masked tokens alone.
    """
    exact = top.double() + temperature.double() * y
    # With y = -inf even an infinite top excludes nothing.
    exact = exact.where((y > -torch.inf) | top.isnan(), -torch.inf).clamp_(min=-LARGEST)
    floor = exact.float()
    return torch.where(floor < exact, floor.nextafter(torch.full_like(floor, torch.inf)), floor)


def least_word(top: Tensor, temperature: Tensor, y: Tensor) -> Tensor:
    """Return int64 [F], the least order word of a logit from `least_logit` on.

    In a row with a NaN, or with nothing but masked tokens, it is above every word. The arguments
    are those of `least_logit`.
    """
    least = word.key(least_logit(top, temperature, y)) << word.TOKEN_BITS
    return least.where(top > -torch.inf, ABOVE_ALL)


def mass_limit(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the int64 limit of the mass before the tokens that top_p keeps; 2^62 where it is off.

    It is ceil(top_p · total), the product taken in float64, and at least 1, so the first token
    stays.
    """
    limit = (total.double() * top_p).ceil().to(torch.int64)
    return torch.where(top_p < 1, limit, 2**62)
