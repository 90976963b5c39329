"""The least logit that the filters of a row can keep, proved from upper bounds of the logits.

    x_v <= upper_v        every logit of a part of the vocabulary, whose ids come one after another
    bar of top_k          the k-th largest exact logit so far, -inf if there are fewer
    bar of min_p          the largest exact logit so far + T ln(min_p), rounded down
    bar                   the larger of the two, where both hold (`RowFilter.is_bounded`)
    listed                { v : upper_v >= the bar when v comes }; their exact logits are computed

Whoever has the exact logits of the listed ids, and -inf for every other id, finds the kept set of
the row, and the mass that top_p takes a share of, as from all logits. For let u be an id of the
part that is not listed. Then x_u <= upper_u < bar, and u is neither kept nor weighed:

    top_k    k ids have a logit that reaches the bar. All k come before u, and none is as small as
             u, so that u is not even a tie of the k-th.
    min_p    the largest logit is at least that so far, and a kept one at least that + T ln(min_p).

A listed id v that is not kept is not taken for a kept one either. If an id before v is missing then
x_v is below the bar, too. Either that is the bar of min_p, which v itself does not reach. Or the k
ids come before v, and they are listed, so that v is not among the first k. Otherwise nothing before
v is missing: number and mass are what they were.

All of this holds on every part and every rank by itself, because the k-th largest logit, and the
largest one, of the whole vocabulary are not below those of a part.
"""

DOWN = 2.0**-20
"""Relative; more than the roundings of the bar of min_p and of what it is compared with."""
