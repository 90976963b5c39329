"""The least logit that the filters of a row can keep, proved from bounds of the logits.

    lower_v <= x_v <= upper_v                          the logits of a part of the vocabulary
    bar of top_k   the k-th largest of the groups' largest lower ends, -inf if they are fewer
    bar of min_p   max lower + T ln(min_p)             rounded down
    bar            the larger of the two, where both hold (`tpsample.request.bounded_rows`)
    listed         { v : upper_v >= bar }

Whoever has the exact logits of the listed ids, and -inf for every other id, finds the kept set of
the row, and the mass that top_p takes a share of, as from all logits. For let u be an id of the
part that is not listed. Then x_u <= upper_u < bar, and u is neither kept nor weighed:

    top_k    k groups have an id each whose logit reaches the bar. All k come before u, and none is
             as small as u, so that u is not even a tie of the k-th.
    min_p    the largest logit is at least max lower, and a kept one at least that + T ln(min_p).

A listed id v that is not kept is not taken for a kept one either. If an id before v is missing then
x_v is below the bar, too. Either that is the bar of min_p, which v itself does not reach. Or the k
ids of the groups come before v, and they are listed, so that v is not among the first k. Otherwise
nothing before v is missing: number and mass are what they were.

All of this holds on every part and every rank by itself, because the k-th largest logit, and the
largest one, of the whole vocabulary are not below those of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.row_noise import safe_temperature

GROUP = 16
"""Ids whose largest lower end is looked at in place of them."""
DOWN = 2.0**-20
"""Relative; more than the roundings of the bar of min_p and of what it is compared with."""


def group_tops(values: Tensor) -> Tensor:
    """Return the largest of every GROUP neighbouring columns, fp32 [F, groups] of fp32 [F, n]."""
    behind = -values.shape[1] % GROUP
    padded = torch.nn.functional.pad(values, (0, behind), value=-torch.inf)
    return padded.view(len(values), -1, GROUP).amax(dim=2)


def filter_bars(lower: Tensor, top_k: Tensor, log_min_p: Tensor, temperature: Tensor) -> Tensor:
    """Return fp32 [F], what the upper end of a logit must reach to be listed.

    Args:
        lower: fp32 [F, groups], largest lower ends of groups of logits.
        top_k, log_min_p: what `row_bounds` returns.
        temperature: fp32 [F].
    """
    groups = lower.shape[1]
    most = min(groups, max(1, int(top_k.max())))
    highest = lower.topk(most, dim=1).values
    of_top_k = highest.gather(1, (top_k.clamp(1, most) - 1).unsqueeze(1)).squeeze(1)
    of_top_k = of_top_k.where((top_k > 0) & (top_k <= groups), -torch.inf)
    top = highest[:, 0].double()
    step = safe_temperature(temperature)[0].double() * log_min_p
    of_min_p = top + step - DOWN * (top.abs() - step) - 1e-30
    of_min_p = of_min_p.where((top > -torch.inf) & (step > -torch.inf), -torch.inf)
    return torch.maximum(of_top_k, of_min_p.float())
