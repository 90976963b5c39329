"""The definition of a verification in plain PyTorch, with whole logits, no ranks and no tiles.

`tpsample.verify` must return these tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample import reference
from tpsample.core import residual, word
from tpsample.core.acceptance import (
    DOMAIN_RECOVERY,
    accept_block,
    accept_tokenwise,
    coefficients,
    leading,
    position_of_rows,
    uniforms,
)
from tpsample.core.checks import positions_tensor
from tpsample.core.masses import TOP_MASS, masses
from tpsample.core.order import order_words
from tpsample.core.row_noise import SeedSource, safe_temperature
from tpsample.core.word import Status
from tpsample.noise import row_stream, tile_noise
from tpsample.output import VerifyOutput
from tpsample.request.plan import BatchView
from tpsample.request.step_batch import StepBatch
from tpsample.speculative.drafting import Method


def verify(
    logits: Tensor,
    draft_token_ids: Tensor,
    batch: StepBatch,
    positions: Tensor | int,
    *,
    method: Method = "coupled",
    draft_logits: Tensor | None = None,
) -> VerifyOutput:
    """Verify drafts as `tpsample.verify` does, on whole logits.

    Args:
        logits: [B, K + 1, V], raw, of any floating dtype.
        draft_logits: [B, K, V], or None.

    The other arguments, and what is returned, are those of `tpsample.verify`.
    """
    num_rows, width, vocab_size = logits.shape
    batch = batch._for_rows(num_rows)
    batch._draw_seeds(SeedSource())
    seed = batch.seed.clone()
    positions = positions_tensor(positions, num_rows, logits.device)
    none = torch.full((num_rows, 1), word.NO_TOKEN, device=logits.device)
    drafts = torch.cat([draft_token_ids, none], dim=1)
    undrawn, outside = batch._undrawn_rows, (drafts < 0) | (drafts >= vocab_size)
    if undrawn is not None:
        outside |= undrawn.rows.unsqueeze(1)
    drafts = drafts.masked_fill(outside.cumsum(dim=1) > 0, word.NO_TOKEN)

    expanded = batch._with_drafts(drafts[:, :-1])
    flat, row_positions = logits.float().flatten(0, 1), position_of_rows(positions, width)
    if method == "coupled":
        plain = reference.sample(flat, expanded, row_positions)
        token_ids, status = (x.view(num_rows, width) for x in (plain.token_ids, plain.status))
        accepted = leading((drafts == token_ids) & (drafts >= 0))
        return VerifyOutput.of(accepted, token_ids, status, seed)

    processed = reference.processed_logits(flat, expanded)
    logits = processed.view(logits.shape)
    empty = ~reference.can_be_drawn(processed, expanded).view(logits.shape).any(dim=2)
    status = empty.int() * int(Status.EMPTY)
    status = status.masked_fill(logits.isnan().any(dim=2), int(Status.NAN))
    if draft_logits is not None:
        nan = torch.zeros_like(outside)
        nan[:, :-1] = draft_logits.isnan().any(dim=2)
        status = status.masked_fill(nan & (drafts >= 0) & (status == Status.OK), int(Status.NAN))
    good = status == Status.OK
    drafts = drafts.where(good, word.NO_TOKEN)
    target, total = _target_masses(flat, expanded)
    target, total = target.view(logits.shape), total.view(drafts.shape)
    draft, draft_total = _draft_masses(draft_logits, drafts, batch, target)
    own = drafts.clamp(min=0).unsqueeze(2)
    p, q = (
        (mass.gather(2, own).squeeze(2) * (drafts >= 0)).double() / of.double()
        for mass, of in ((target, total), (draft, draft_total))
    )
    draft *= (q > 0).unsqueeze(2)
    u = uniforms(seed, positions, width)
    coefficient = torch.ones_like(u)
    if method == "block":
        coefficient = coefficients(p, q)
    weights = (
        residual.share_weight(c, of).unsqueeze(2)
        for c, of in ((coefficient, total), (torch.ones_like(u), draft_total))
    )
    left = residual.residuals(target, next(weights), draft, next(weights))
    if method == "block":
        sums = left.sum(dim=2).double() * 2.0**-residual.SHARE_BITS
        stop = accept_block(coefficient, sums.where(good, coefficient), u)
    else:
        stop = accept_tokenwise(p, q, u)

    row_index = torch.arange(num_rows, device=stop.device)
    streams = tuple(
        r.unsqueeze(1) for r in row_stream(seed, positions + stop, stop, domain=DOMAIN_RECOVERY)
    )
    noise = tile_noise(streams, 0, vocab_size)
    scores = residual.recovery_scores(left[row_index, stop], target[row_index, stop], noise)
    token, _ = word.decode(order_words(scores).amax(dim=1))
    token = token.where(good[row_index, stop], word.NO_TOKEN).unsqueeze(1)
    emitted = drafts.scatter(1, stop.unsqueeze(1), token)
    verified = VerifyOutput.of(stop, emitted, status, seed)
    if undrawn is not None:
        verified.fill_skipped(*undrawn)
    return verified


def _target_masses(logits: Tensor, batch: BatchView) -> tuple[Tensor, Tensor]:
    """Return int64 [B · (K + 1), V] and their sums; anything in a row whose status is not OK."""
    kept = reference.kept_mask(logits, batch)
    logits = reference.processed_logits(logits, batch)
    words = order_words(logits)
    top = logits.amax(dim=1, keepdim=True)
    temperature, random = safe_temperature(batch.temperature.unsqueeze(1))
    first = words == words.amax(dim=1, keepdim=True)
    kept = torch.where(random & (top < torch.inf), kept, first)
    mass = masses(logits, top, temperature) * kept
    return mass, mass.sum(dim=1).clamp(min=1)


def _draft_masses(
    draft: Tensor | None, drafts: Tensor, batch: StepBatch, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return int64 [B, K + 1, V] and their sums; 0 where there is no draft."""
    mass = torch.zeros_like(like)
    if draft is None:
        mass.scatter_(2, drafts.clamp(min=0).unsqueeze(2), TOP_MASS)
    elif draft.shape[1]:
        logits = draft.float()
        temperature, _ = safe_temperature(batch.temperature.view(-1, 1, 1))
        q = masses(logits, logits.amax(dim=2, keepdim=True), temperature)
        mass[:, :-1] = q * (logits > -torch.inf)
    mass *= (drafts >= 0).unsqueeze(2)
    return mass, mass.sum(dim=2).clamp(min=1)
