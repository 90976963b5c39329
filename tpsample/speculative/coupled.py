"""Verification by the sampler itself: accept a draft iff it is the token plain decoding draws.

    y_i = the token of position i, sampled as ever     i = 0 … K
    accept x_(i+1) while it equals y_i; emit y_0 … y_a, a the number accepted

The tokens are plain decoding's bit for bit, whatever drafted them, if the hidden states are those
of plain decoding. Noise belongs to (seed, position, token id), so a position's token does not
depend on the step that draws it. A draft is accepted with probability p(x); one drawn with the same
noise is accepted more often, with at least (1 - d) / (1 + d), where d is the total variation
between target and draft (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.output import Logprobs, SampleOutput
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.output import VerifyOutput, leading, position_of_rows, reached


def verify_coupled(
    sampler: LMHeadSampler,
    inputs: Inputs,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
) -> VerifyOutput:
    """Sample all B · (K + 1) rows in one step of whatever backend. Collective.

    Args:
        inputs: hidden states or logits of [B, K + 1] rows.
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B].
    """
    num_rows, width = drafts.shape
    out, at = SampleOutput.empty(batch.seed, None), position_of_rows(positions, width)
    sampler.end(sampler.begin(inputs, batch, at, out))
    token_ids, status = out.token_ids.view(num_rows, width), out.status.view(num_rows, width)
    num_accepted = leading((drafts == token_ids) & (drafts >= 0))
    verified = VerifyOutput.of(num_accepted, token_ids, status, out.seeds[::width].contiguous())
    if out.logprobs is not None:
        verified.logprobs = _emitted(out.logprobs, reached(num_accepted, width).flatten())
    return verified


def _emitted(logprobs: Logprobs, emitted: Tensor) -> Logprobs:
    """Blank the logprobs of positions where nothing was emitted."""
    emitted = emitted.unsqueeze(1)
    return Logprobs(
        logprobs.token_ids.where(emitted, -1),
        logprobs.values.where(emitted, torch.nan),
        logprobs.ranks.where(emitted, 0),
        logprobs.entropies.where(emitted.squeeze(1), torch.nan),
    )
