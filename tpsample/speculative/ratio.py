"""Verification by the ratio of the two laws p and q and by their residual, none of them gathered.

hidden states → the target's local logits → both laws → where the row stops → residual → token

The token after the accepted drafts is a draw from the residual, by Gumbel-max:

    argmax over v of log2 max(c · p_v - q_v, 0) - L_v        L the noise of the recovery domain

Where there was no draft q = 0, so this is a draw from the target: the bonus token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tpsample.core import word
from tpsample.core.order import order_words
from tpsample.logits.finish import logprobs_of, shard_logits
from tpsample.noise import row_stream, tile_noise
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.plan import BatchView
from tpsample.request.step import Inputs
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.acceptance import (
    DOMAIN_RECOVERY,
    accept_tokenwise,
    emit,
    position_of_rows,
    stop_block,
    uniforms,
)
from tpsample.speculative.laws import Laws


def verify_by_ratio(
    sampler: LMHeadSampler,
    inputs: Inputs,
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
        inputs: hidden states or logits of [B, K + 1] rows.
        drafts: int64 [B, K + 1], -1 where there is none.
        batch: the rows after each of their drafts.
        positions: int64 [B].
        block: whether drafts are accepted as a block.
        draft: [B, K, V_local], the drafter's logits; None if the drafts were certain.
    """
    num_rows, width = drafts.shape
    batch = replace(batch, plan=batch.plan.storing_every_row)
    # A draw of every row, because it tells the row's status.
    out, at = SampleOutput.empty(batch.seed, None), position_of_rows(positions, width)
    step = sampler.begin(inputs, batch, at, out)
    sampler.exchange.finish(out, batch.seed)
    stored, ranks = shard_logits(step, sampler.shard, sampler.backend), sampler.ranks
    laws = Laws.of(stored, batch, drafts, draft, out.status.view(num_rows, width), ranks)

    seed = batch.seed[::width].clone()  # the output is a value
    u = uniforms(seed, positions, width)
    if block:
        stop, coefficient = stop_block(laws, u, ranks)
    else:
        stop, coefficient = accept_tokenwise(laws.p, laws.q, u), torch.ones_like(u[:, 0])

    noise = row_stream(seed, positions + stop, stop, domain=DOMAIN_RECOVERY)
    token = recovered(laws.at(stop), coefficient, noise, stored.noise.rounds, ranks)
    verified = VerifyOutput.of(stop, emit(drafts, stop, token), laws.status, seed)
    if batch.plan.logprobs is not None:
        verified.logprobs = logprobs_of(stored, batch, ranks, verified.token_ids.flatten())
    return verified


def recovered(
    laws: Laws, coefficient: Tensor, stream: tuple[Tensor, ...], rounds: int, ranks: Ranks
) -> Tensor:
    """Return the tokens, int64 [B], -1 where the status is not OK. Collective: one gather.

    Args:
        laws: at one position of each row.
        coefficient: float64 [B].
        stream: row stream of each row, int64 [B] tensors.
        rounds: Philox rounds.
    """
    best = torch.zeros_like(laws.drafts)
    streams = tuple(r.view(-1, 1, 1) for r in stream)
    for first_id, residual in laws.residual_tiles(coefficient.unsqueeze(1)):
        noise = tile_noise(streams, first_id, residual.shape[2], rounds)
        words = order_words(recovery_scores(residual, noise), first_id)
        best = best.maximum(words.amax(dim=2))
    token_ids, _ = word.decode(ranks.gather_integers(best).amax(dim=0))
    return token_ids.where(laws.status == word.Status.OK, word.NO_TOKEN).squeeze(1)


def recovery_scores(residual: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 scores, rounded once; -inf where the residual is 0."""
    return (residual.log2() - noise.double()).float()
