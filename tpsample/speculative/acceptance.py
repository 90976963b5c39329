"""Verification by the ratio of the laws p and q: token by token, or the longest prefix that passes.

hidden states → the target's local logits → both laws → where the row stops → residual → token

    rejection   a = the number of drafts before the first with u q(x) >= p(x)
    block       c_0 = 1,  c_i = min(1, c_(i-1) · p(x_i) / q(x_i))      the prefix's coefficient
                s_i = Σ_v max(c_i · p_v - q_v, 0)                      after the prefix
                a   = the largest i with u_i < s_i / (s_i + 1 - c_i)   or 0

p and q of s_i are the laws after x_1 … x_i. Where there is no draft q = 0 and s_i = c_i, so the
test of the last draft is u < c. After the accepted drafts comes a draw from the residual, at c = 1
or at c_a, by Gumbel-max:

    argmax over v of log2 max(c · p_v - q_v, 0) - L_v        L the noise of the recovery domain

Both laws are ratios of integers, and the residual is an integer too (`tpsample.core.residual`), so
what ranks sum does not depend on their number. `tpsample.backends.torch_.verification` has the
passes over the logits.

Where there was no draft this is a draw from the target: the bonus token. With both rules the tokens
follow the target's law at every position, whatever the draft (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318). A block accepts no fewer drafts in expectation (Sun et al., arXiv
2403.10444).

Accepting, recovering and drafting must be independent of each other and of token noise. So each has
its own domain word in the counter of the row stream. The `sample` word of the counter is the index
of the position within its verification. A position that a verification looked at and did not reach
is verified again by the next one. There it has a smaller index and so fresh numbers. It needs them,
because the stopping place of a block already depended on the old ones.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpsample.backends import room_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.backends.torch_.verification import Laws, Verification
from tpsample.core.caller_warning import warn
from tpsample.filters.finish import Filtered, logprobs_of, shard_logits
from tpsample.filters.kept_sets import Cut, find_cut, kept_sets_of
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.filters import RowFilters, lists_all
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.drawn_drafts import OTHER_LAW, drawn_drafts


def verify_by_ratio(
    sampler: LMHeadSampler,
    inputs: Inputs,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
    at: Tensor,
    *,
    block: bool,
    draft: Tensor | None,
) -> VerifyOutput:
    """Verify token by token, or as a block. Collective.

    The sampler's backend makes the local logits and the passes over them. There are four exchanges:
    the words, the largest logits, the sums, and words of the residuals. Where ranks meet on the
    host, the largest logits travel with the words.

    Args:
        inputs: hidden states or logits of [B, K + 1] rows.
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B].
        at: int64 [B · (K + 1)], those of all rows.
        block: whether drafts are accepted as a block.
        draft: [B, K, V_local], the drafter's logits; None if the drafts were certain.
    """
    num_rows, width = drafts.shape
    batch = batch._replace(plan=batch.plan.storing_every_row)
    # A draw of every row, because it tells the row's status.
    out = SampleOutput.empty(batch.seed, None)
    if draft is not None and draft.stride(2) != 1:
        draft = draft.contiguous()
    verification_type = room_of(sampler.backend).verification

    def verification_of(rows: ShardLogits) -> Verification:
        return verification_type(
            rows=rows,
            draft=draft,
            drafts=drafts,
            sampled=out.token_ids.view(num_rows, width),
            status=out.status.view(num_rows, width),  # the exchange writes both
            seed=batch.seed[::width].clone(),  # the output is a value
            positions=positions,
            block=block,
        )

    step = sampler.pipeline.begin(
        inputs, batch, at, out, payloads_of=lambda rows, *_: [verification_of(rows).tops()]
    )
    sampler.agreement.compare()
    written = out, batch.seed, batch.undrawn
    sampler.exchange.finish(sampler.exchange.wait(*written), *written)
    stored, ranks = shard_logits(step, sampler.shard, sampler.backend), sampler.ranks
    verification, payloads = verification_of(stored), sampler.exchange.payloads()
    laws = verification.laws(
        ranks.gather_integers(verification.tops()) if payloads is None else payloads[0]
    )
    cut: Cut | None = None
    if batch.plan.filters is not None:
        cut = filtered_cut(stored, batch, laws, ranks)
        laws = _within(laws, cut.words, batch.plan.filters)
    sums = ranks.sum_integers(verification.sums(laws))
    laws, places = verification.accept(laws, sums)
    if draft is not None and drawn_drafts(sampler).are_of_another_law(verification, laws, sums):
        warn(OTHER_LAW)
    verified = verification.output(
        laws, places, ranks.gather_integers(verification.residuals(laws, places))
    )
    if batch.plan.logprobs is not None:
        tokens = verified.token_ids.flatten()
        verified.logprobs = logprobs_of(stored, batch, ranks, tokens, Filtered(cut=cut))
    if cut is not None and batch.plan.kept_cap is not None:
        # A row that failed emits nothing where it stops.
        emitted = (verified.token_ids >= 0).flatten()
        verified.kept = kept_sets_of(cut, batch, ranks, emitted)
    return verified


def filtered_cut(rows: ShardLogits, batch: BatchView, laws: Laws, ranks: Ranks) -> Cut:
    """Return where the kept sets of the filtered rows end. Collective, because `find_cut` is."""
    filters, reads = batch.plan.filters, batch.may_read
    assert filters is not None
    rows = replace(rows, top=laws.top.flatten())
    if batch.plan.kept_cap is not None:  # then all rows are filtered
        return find_cut(rows, filters, ranks, may_read=reads, of_greedy=laws.cut.flatten())
    if not lists_all(filters.row_list, len(rows.largest)):
        rows = rows.select(filters.row_index)
    return find_cut(rows, filters, ranks, may_read=reads)


def _within(laws: Laws, ends: Tensor, filters: RowFilters) -> Laws:
    """Return the laws with each filtered row cut off at the end of its kept set, an order word
    [F]."""
    cut, index = laws.cut.flatten(), filters.row_index
    if lists_all(filters.row_list, len(cut)):
        cut = ends.maximum(cut)
    else:
        cut = cut.index_copy(0, index, ends.maximum(cut[index]))
    return replace(laws, cut=cut.view(laws.cut.shape))
