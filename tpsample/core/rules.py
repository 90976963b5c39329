"""The filter rules of a request: each is described here once, and all else follows from it.

Every rule keeps a prefix of the order of tokens (`tpsample.core.order`). The prefix ends with

    a number of tokens    top_k
    a share of a mass     top_p
    an order word         every other rule, by its `Rule.end`

The orders in which a request may apply its rules differ in one thing alone: top_p takes a share of
the mass of the tokens that the rules before it leave.

Fields, ranges, columns on the device and digests follow from the descriptions. So do the needs and
launches of a step, the kinds of a warm-up, and the table of the rules in `tpsample/README.md`. The
passes of the backends know no rule. A new rule with an `end` is written here, in `RULES` too, and

    tpsample/request/params.py        a field of `SamplingParams`, and its line in the docstring
    tpsample/MASSES.md                a section with its operations, under its name
    tpsample/README.md                a row of the table of filters
    tests/support/fields.py           numbers that it takes, and some that it refuses
    tests/support/oracle.py           its definition a second time
    tests/filters/test_kept_set.py    sets that were worked out by hand
    tests/support/golden.json         `python -m tests.support.golden` adds its tokens
    CHANGELOG.md                      its name

The order of `RULES` is that of the page, and no token depends on it. These tests see whatever was
left out:

    tests/test_fields.py  tests/test_interface.py
    tests/filters/test_kept_set.py  tests/sampler/test_golden.py

A rule that drops a token which is likelier than one that it keeps, as `typical_p` does, cannot
stand here. The backends look for one order word, and every token down to it is kept. The caller
sets the logits of dropped tokens to -inf, and passes them to `sample_logits`.

A rule learns of its rows by the facts of `FilteredRows`. Another fact is a method there, and in

    tpsample/filters/thresholds.py    from sums over the ranks, of integers
    tpsample/reference.py             from whole rows

Rules remove tokens. None of them can make another rule keep more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tpsample.core.masses import LN2, TOP_MASS
from tpsample.core.order import LARGEST

FilterOrder = Literal["sequential", "joint", "min_p_last"]


class FilteredRows(Protocol):
    """Facts of F rows over all ranks, the same on each of them, from which rules find words."""

    @property
    def temperature(self) -> Tensor:
        """fp32 [F], for `least_word` alone: a kernel reads what was written, and makes it safe."""

    def least_word(self, y: Tensor, temperature: Tensor) -> Tensor:
        """Return the least order word of a logit that is at least max x + temperature · y, y <= 0.

        Args:
            y: float64 [F].
            temperature: fp32 [F], `temperature` or ones; a kernel takes ones for one below 1e-5.
        """

    def total_mass(self) -> Tensor:
        """Return int64 [F], the mass of all unmasked tokens."""

    def total_moment(self) -> tuple[Tensor, Tensor]:
        """Return the mass and the moment of all unmasked tokens, int64 [F] each; the entropy
        follows from them (`tpsample.core.masses`)."""

    def least_of_mass(self, limit: Tensor) -> Tensor:
        """Return the last order word whose token has a mass of at least `limit`.

        Args:
            limit: int64 [F], at most `TOP_MASS`; below 1 it excludes masked tokens alone.
        """

    def spread(self) -> Tensor:
        """Return float64 [F], the standard deviation of the unmasked logits."""


@dataclass(frozen=True)
class Rule:
    """A filter rule.

    Attributes:
        name: the field of `SamplingParams`.
        off: the number with which it keeps every token.
        valid: whether a request may have a number.
        expected: which numbers those are, in words.
        cuts: whether a number removes tokens; also of the numbers of a tensor, one by one.
        low, high: a number of a tensor beyond these counts as these, if it cuts.
        example: a number that cuts.
        by_logarithm: whether steps read the logarithm of the number.
        end: returns the order word, int64 [F], with which the kept tokens end, from what steps read
            of the number, float64 [F]. No masked token has such a word. None of top_k and top_p.
            It may ask for + - * / and sqrt of float64, for roundings, and for integers: they give
            a row the same bits on any device and beside any rows, as `exp2` and `log` do not.
        known: whether the number that steps read is a distance y = (x - max x) / T <= 0, at which
            the rule ends. A rank then leaves out logits that lie lower, before the ranks meet.
            Otherwise it needs all of them.
    """

    name: str
    valid: Callable[[float], bool]
    expected: str
    high: float
    example: float
    off: float = 0.0
    cuts: Callable[[Any], Any] = lambda number: number > 0
    low: float = 0.0
    by_logarithm: bool = False
    end: Callable[[FilteredRows, Tensor], Tensor] | None = None
    known: bool = False

    def read(self, number: float, vocab_size: int) -> float:
        """Return what steps read of a number of a request."""
        if self is TOP_K:
            return vocab_size if number < 1 else min(number, vocab_size)
        if self.by_logarithm:
            return math.log(number) if number > 0 else -math.inf
        return number

    def meant(self, numbers: Tensor, vocab_size: int) -> Tensor:
        """Return what the numbers of an engine's tensor mean, int64 or float64, all in range."""
        if self is TOP_K:
            k = numbers.to(torch.int64)
            return k.where((k >= 1) & (k < vocab_size), vocab_size)
        numbers = numbers.detach().double()
        return numbers.clamp(self.low, self.high).where(self.cuts(numbers), self.off)


def _least_of_min_p(rows: FilteredRows, log_min_p: Tensor) -> Tensor:
    """x >= max x + T · ln(min_p)."""
    return rows.least_word(log_min_p, rows.temperature)


def _down_to_mass(rows: FilteredRows, limit: Tensor) -> Tensor:
    """q >= min(rint(limit), 2^40), so that the likeliest token stays."""
    return rows.least_of_mass(limit.round().clamp(max=TOP_MASS).to(torch.int64))


def _least_of_epsilon(rows: FilteredRows, epsilon: Tensor) -> Tensor:
    """q >= rint(ε · Q), Q the mass of all unmasked tokens."""
    return _down_to_mass(rows, rows.total_mass().double() * epsilon)


def _least_of_sigma(rows: FilteredRows, n: Tensor) -> Tensor:
    """x >= max x - n · σ, before temperature."""
    y = torch.where(n > 0, -n * rows.spread(), -torch.inf)
    return rows.least_word(y, torch.ones_like(rows.temperature))


def _least_of_eta(rows: FilteredRows, eta: Tensor) -> Tensor:
    """q >= min(rint(η · Q), rint(√η · 2^40 · 2^(-M / Q))): p >= min(η, √η · e^-H)."""
    total, moment = (sums.double() for sums in rows.total_moment())
    by_entropy = eta.sqrt() * TOP_MASS * _two_to_minus(moment / total)
    return _down_to_mass(rows, (eta * total).minimum(by_entropy))


def _two_to_minus(bits: Tensor) -> Tensor:
    """2^-bits by operations that round alike, float64; the bits lie in 0 … 62."""
    whole = bits.ceil()
    x, power = (whole - bits) * LN2, torch.ones_like(bits)
    for n in range(18, 0, -1):
        power = 1 + power * x / n
    return power / (1 << whole.to(torch.int64))


TOP_K = Rule(
    name="top_k",
    valid=lambda k: k >= -1,
    expected="an int >= -1 (0 and -1 keep every token)",
    high=2**31,
    example=2,
    off=0,
)
TOP_P = Rule(
    name="top_p",
    off=1.0,
    valid=lambda p: 0 < p <= 1,
    expected="a number in (0, 1]",
    cuts=lambda p: p < 1,
    low=2.0**-60,  # leaves one token of any total
    high=1.0,
    example=0.9,
)
MIN_P = Rule(
    name="min_p",
    valid=lambda p: 0 <= p <= 1,
    expected="a number in [0, 1]",
    high=1.0,
    example=0.1,
    by_logarithm=True,
    end=_least_of_min_p,
    known=True,
)

EPSILON_CUTOFF = Rule(
    name="epsilon_cutoff",
    valid=lambda epsilon: 0 <= epsilon < 1,
    expected="a number in [0, 1)",
    high=math.nextafter(1.0, 0.0),
    example=0.001,
    end=_least_of_epsilon,
)

TOP_N_SIGMA = Rule(
    name="top_n_sigma",
    valid=lambda n: 0 <= n <= LARGEST,
    expected="a finite fp32 number >= 0",
    high=LARGEST,
    example=1.0,
    end=_least_of_sigma,
)

ETA_CUTOFF = Rule(
    name="eta_cutoff",
    valid=lambda eta: 0 <= eta < 1,
    expected="a number in [0, 1)",
    high=math.nextafter(1.0, 0.0),
    example=0.002,
    end=_least_of_eta,
)

RULES = (TOP_K, TOP_P, MIN_P, EPSILON_CUTOFF, TOP_N_SIGMA, ETA_CUTOFF)
ENDING = tuple(rule for rule in RULES if rule.end is not None)
"""The rules that end at an order word."""


BEHIND_TOP_P: dict[FilterOrder, tuple[Rule, ...]] = {
    "sequential": (),
    "joint": (TOP_K,),
    "min_p_last": (MIN_P,),
}
"""By `filter_order`, the rules behind top_p. The others stand before it, top_k as the last."""


def behind_top_p(filter_order: FilterOrder) -> tuple[bool, ...]:
    """Return whether top_k, and each rule of `ENDING`, stands behind top_p."""
    behind = BEHIND_TOP_P[filter_order]
    return tuple(rule in behind for rule in (TOP_K, *ENDING))
