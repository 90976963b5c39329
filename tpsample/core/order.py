"""The tokens that a row may draw: one total order, integer masses; min_p, top_k and top_p.

    order   logit descending, then token id ascending: descending `order_words`
    below   y_v = (x_v - max x) / T                 fp32 in, float64, each operation rounded once
    mass    q_v = rint(2^40 · 2^(y_v · log2 e))     int64, 0 … 2^40
    min_p   keep v iff y_v >= ln(min_p)
    top_k   keep the first k; ties="keep" also what equals the k-th logit
    top_p   keep v iff the mass before v < ceil(top_p · Z); ties="keep" also what equals the logit
            of the last one, because then only greater logits count as before v

Each rule keeps a prefix of the order, so the kept set is the shortest of them. The order in which
the rules apply changes only the mass Z that top_p takes a share of (`filter_order`):

    sequential   min_p, then top_k, then top_p      Z is the mass of what both left
    joint        min_p, then top_k beside top_p     Z is the mass of what min_p left
    min_p_last   top_k, then top_p, then min_p      Z is the mass of what top_k left

A masked token (-inf) is never kept, and a row with +inf logits has mass on these alone. Sums of
masses are sums of integers (at most 2^20 · 2^40), so the boundary does not depend on the order of
summation, hence not on ranks, shards or tiles. The exponential is spelled out in IEEE additions and
multiplications, so a mass does not depend on a device's math library; it lies within one unit of
the real number.

"sequential" is vLLM's order, "joint" FlashInfer's and by default SGLang's; min_p comes last in
transformers, llama.cpp, TensorRT-LLM and SGLang. FlashInfer keeps ties, of top_k and of top_p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.row_noise import LOG2_E

TOP_MASS = 2**40
"""Mass of the most likely token."""

DIGIT_BITS = 6
DIGITS = 1 << DIGIT_BITS
"""Of an order word, as a radix search takes them."""

POWER_OF_2 = [math.log(2) ** n / math.factorial(n) for n in range(14)]
"""Taylor series of 2^f; on |f| <= 1/2 its remainder is below 2^-57."""


@dataclass(frozen=True)
class Search:
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


def masses(below: Tensor) -> Tensor:
    """Return q = rint(2^40 · e^y), int64, of y <= 0 in float64."""
    return power_of_2((below * LOG2_E).clamp_(min=-64.0)).mul_(TOP_MASS).round_().to(torch.int64)


def power_of_2(exponent: Tensor) -> Tensor:
    """Return 2^x of float64 x, |x| <= 1000, by IEEE operations alone."""
    whole = exponent.round()
    fraction = exponent - whole
    power = torch.full_like(fraction, POWER_OF_2[-1])
    for coefficient in POWER_OF_2[-2::-1]:
        power.mul_(fraction).add_(coefficient)
    # 2^whole from its exponent bits, so the scaling is exact.
    return power.mul_(whole.to(torch.int64).add_(1023).bitwise_left_shift_(52).view(torch.float64))


def candidates(order_word: Tensor, below: Tensor, log_min_p: Tensor) -> Tensor:
    """Return which tokens neither a mask nor min_p cuts; they are a prefix of the order."""
    return (word.key_of(order_word) > word.KEY_MINUS_INF) & (below >= log_min_p)


def min_p_cut(top: Tensor, temperature: Tensor, log_min_p: Tensor) -> Tensor:
    """Return int64 [F], the least order word that neither a mask nor min_p cuts.

    `below_top` never falls as the logit rises, so the last of all fp32 keys that is cut is found a
    byte at a time. In a row with a NaN, or with nothing but masked tokens, every key is cut.

    Args:
        top: fp32 [F], largest logits over all ranks.
        temperature: fp32 [F].
        log_min_p: float64 [F].
    """
    top, temperature, log_min_p = (x.unsqueeze(1) for x in (top, temperature, log_min_p))
    bytes_ = torch.arange(256, device=top.device)
    key = torch.zeros_like(top, dtype=torch.int64)
    for shift in (24, 16, 8, 0):
        keys = (key + (bytes_ << shift)).clamp(min=word.KEY_MINUS_INF).minimum(word.key(top))
        words = keys << word.TOKEN_BITS
        kept = candidates(words, below_top(word.value_of(words), top, temperature), log_min_p)
        key += ((~kept).sum(dim=1, keepdim=True) - 1) << shift
    return (key.squeeze(1) + 1) << word.TOKEN_BITS


def mass_limit(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the int64 limit of the mass before the tokens that top_p keeps; 2^62 where it is off.

    It is ceil(top_p · total), the product taken in float64, and at least 1, so the first token
    stays.
    """
    limit = (total.double() * top_p).ceil().to(torch.int64)
    return torch.where(top_p < 1, limit, 2**62)
