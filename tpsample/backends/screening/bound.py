"""The least logit that the filters of a row can keep, proved from upper bounds of the logits.

    x_v <= upper_v        every logit of a part of the vocabulary, whose ids come one after another
    threshold of top_k    the k-th largest lower bound of a logit so far, -inf if there are fewer
    threshold of y        the largest lower bound so far + T y, rounded down; y = (x - max x) / T is
                          the least that a rule such as min_p keeps (`Demand.least`)
    threshold             the larger of the two, where both hold
    listed                { v : upper_v >= the threshold when v comes, or later }, with their logits

The exact logits of the listed ids, with -inf for every other id, give the same kept set of the row
as all logits. The mass that top_p takes a share of is the same, too. For let u be an id of the part
that is not listed. Then x_u <= upper_u < threshold, and u is neither kept nor weighed:

    top_k    k ids have a logit that reaches it. All k come before u, and none is as small as
             u, so that u is not even a tie of the k-th.
    y        the largest logit is at least that bound, and a kept one at least that + T y.

A listed id v that is not kept is not taken for a kept one either. If an id before v is missing then
x_v is below the threshold, too. Either that is the one of y, which v itself does not reach. Or
the k ids come before v, and they are listed, so that v is not among the first k. Otherwise nothing
before v is missing: number and mass are what they were.

All of this holds on every part and every rank by itself. The k-th largest logit of the whole
vocabulary, and the largest one, are not below those of a part.
"""

from __future__ import annotations

from torch import Tensor

UNIT = 2.0**-24
"""u, the largest relative error of an fp32 operation that rounds to nearest."""
TINY = 2.0**-126
"""η, the largest absolute error where a result is subnormal, flushed to zero or not."""
LARGEST = 2.0**100
"""Rows with a larger magnitude are not bounded: fp32 could overflow."""
DEFINITION_ERROR = 2 * UNIT
"""γ of a product that is exact but for one rounding."""
ROUNDING = 8 * UNIT
"""Relative error of the approximate product: a kernel rounds the limbs' sum and three products."""
DOWN = 2.0**-20
"""By this part the threshold of y is lowered, which is more than all roundings of a comparison."""


def round_up(values: Tensor) -> Tensor:
    """Return non-negative float64 values as fp32 numbers that are at least as large.

    A conversion to nearest loses at most u of a value, or 2^-150 of a subnormal one. Float64
    arithmetic on up to 2^20 numbers of one sign loses far less than the 2 u that remain.
    """
    return (values * (1.0 + 4 * UNIT) + TINY).float()
