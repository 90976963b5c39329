"""Verification by the sampler itself: accept a draft iff it is the token plain decoding draws.

    y_i = the token of position i, sampled as ever     i = 0 … K
    accept x_(i+1) while it equals y_i; emit y_0 … y_a, a the number accepted

What is emitted is plain decoding's text bit for bit, whatever drafted it, if the hidden states are
those of plain decoding: noise belongs to (seed, position, token id), so a position's token does not
depend on the step that draws it. A draft is accepted with probability p(x); one drawn with the same
noise more often, at least (1 - d) / (1 + d), d the total variation between target and draft
(Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.output import Logprobs, SampleOutput
from tpsample.request.plan import BatchView
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.expand import position_of_rows
from tpsample.speculative.output import VerifyOutput, leading, reached


def verify_coupled(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
) -> VerifyOutput:
    """One step over B · (K + 1) rows, filtered or not, in whatever backend. Collective.

    Args:
        hidden_states: [B, K + 1, D].
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the expanded rows.
        positions: int64 [B].
    """
    rows, width = drafts.shape
    out, at = SampleOutput.empty(batch.seed, None), position_of_rows(positions, width)
    sampler.finish(sampler.begin(hidden_states.flatten(0, 1), batch, at, out))
    token_ids, status = out.token_ids.view(rows, width), out.status.view(rows, width)
    num_accepted = leading((drafts == token_ids) & (drafts >= 0))
    verified = VerifyOutput.of(num_accepted, token_ids, status, out.seeds[::width].contiguous())
    if out.logprobs is not None:
        verified.logprobs = _emitted(out.logprobs, reached(num_accepted, width).flatten())
    return verified


def _emitted(logprobs: Logprobs, emitted: Tensor) -> Logprobs:
    """Nothing is told of positions behind the end."""
    emitted = emitted.unsqueeze(1)
    return Logprobs(
        logprobs.token_ids.where(emitted, -1),
        logprobs.values.where(emitted, torch.nan),
        logprobs.ranks.where(emitted, 0),
        logprobs.entropies.where(emitted.squeeze(1), torch.nan),
    )
