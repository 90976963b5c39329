"""Verification by the ratio of the two laws p and q and by their residual, none of them gathered.

hidden states → the target's local logits → both laws → where the row stops → residual → token
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tpsample.logits.finish import logprobs_of, shard_logits
from tpsample.output import SampleOutput
from tpsample.request.plan import BatchView
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.block import stop_block
from tpsample.speculative.laws import Laws
from tpsample.speculative.output import VerifyOutput, emit, position_of_rows
from tpsample.speculative.recovery import recovered
from tpsample.speculative.streams import DOMAIN_RECOVERY, stream, uniforms
from tpsample.speculative.tokenwise import accept_tokenwise


def verify_by_ratio(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    drafts: Tensor,
    batch: BatchView,
    positions: Tensor,
    *,
    block: bool,
    draft: Tensor | None,
) -> VerifyOutput:
    """Verify token by token, or as a block. Collective.

    The local logits come from the sampler's backend, on a GPU from the LM-head kernel. The laws are
    plain PyTorch, tile by tile, on every device.

    Args:
        hidden_states: [B, K + 1, D].
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B].
        draft: [B, K, V_local] or None.
    """
    num_rows, width = drafts.shape
    batch = replace(batch, plan=batch.plan.storing_every_row)
    # A draw of every row, because it tells the row's status.
    out, at = SampleOutput.empty(batch.seed, None), position_of_rows(positions, width)
    step = sampler.begin(hidden_states.flatten(0, 1), batch, at, out)
    sampler.exchange.finish(out, batch.seed)
    stored, ranks = shard_logits(step, sampler.shard, sampler.backend), sampler.ranks
    laws = Laws.of(stored, batch, drafts, draft, out.status.view(num_rows, width), ranks)

    seed = batch.seed[::width].contiguous()
    u = uniforms(seed, positions, width)
    if block:
        stop, coefficient = stop_block(laws, u, ranks)
    else:
        stop, coefficient = accept_tokenwise(laws.p, laws.q, u), torch.ones_like(u[:, 0])

    noise = stream(seed, positions + stop, stop, DOMAIN_RECOVERY)
    token = recovered(laws.at(stop), coefficient, noise, stored.noise.rounds, ranks)
    verified = VerifyOutput.of(stop, emit(drafts, stop, token), laws.status, seed)
    if batch.plan.logprobs is not None:
        verified.logprobs = logprobs_of(stored, batch, ranks, verified.token_ids.flatten())
    return verified
