"""Draws of a drafter from its own sharded logits, in the stream that the verification expects."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample import word
from tpsample.checks import positions_tensor
from tpsample.noise import DOMAIN_TOKEN, tile_noise
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler
from tpsample.score import RowNoise, score
from tpsample.speculative.checks import METHODS
from tpsample.speculative.streams import DOMAIN_DRAFT, stream
from tpsample.step_agreement import CheckedCall


def sample_draft(
    sampler: LMHeadSampler,
    draft_logits: Tensor,
    batch: SamplingBatch,
    positions: Tensor | int,
    index: int,
    *,
    method: str = "coupled",
) -> Tensor:
    """Draft one token per row from softmax(draft_logits / T); greedy rows take the argmax.

    Collective. For "coupled" with the noise that the verification will meet at this position, so
    that target and draft agree as often as their laws allow; for the ratio rules with noise of its
    own, as they need it. A drafter that has hidden states and an `LMHeadSampler` drafts coupled by
    calling that with the same batch and positions, filters included.

    Args:
        sampler: the target's, for its ranks, shard and rounds.
        draft_logits: [B, V_local], this rank's columns.
        batch: B rows, or one request for all rows; its filters are not applied.
        positions: int64 [B], or one int: absolute position of the token to be drafted.
        index: how many drafts of the same verification come before it.
        method: as for `verify`.

    Returns:
        int64 [B], the same on every rank; -1 where the logits are NaN or all -inf.

    Raises:
        ValueError: a wrong method or shape.
    """

    def check() -> CheckedCall:
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        shard = sampler.shard
        if draft_logits.ndim != 2 or draft_logits.shape[1] != len(shard):
            raise ValueError(
                f"draft_logits: expected [B, {len(shard)}], the columns of {shard}, "
                f"got {list(draft_logits.shape)}"
            )
        sampler.exchange.integers.require_group("sample_draft")
        rows = draft_logits.shape[0]
        batch.for_rows(rows)
        at = positions_tensor(positions, rows, draft_logits.device)
        return CheckedCall(f"sample_draft {method}", at, index)

    sampler.settled(check)
    rows = draft_logits.shape[0]
    batch = batch.for_rows(rows)
    if batch.unseeded:
        batch.draw_seeds(sampler.seeds)
    positions = positions_tensor(positions, rows, draft_logits.device)
    if method == "coupled":
        index, domain = 0, DOMAIN_TOKEN
    else:
        domain = DOMAIN_DRAFT
    streams = stream(batch.seed.unsqueeze(1), positions.unsqueeze(1), index, domain)
    best = positions.new_zeros(rows)
    if draft_logits.shape[1]:
        first_id = sampler.shard.start
        row_noise = RowNoise.of(batch, positions, 1, sampler.philox_rounds)
        noise = tile_noise(streams, first_id, draft_logits.shape[1], sampler.philox_rounds)
        scores = score(draft_logits.float(), noise, row_noise)
        ids = torch.arange(first_id, sampler.shard.stop, device=positions.device)
        best = word.pack(scores, ids).amax(dim=1)
    token_ids, _ = word.decode(sampler.exchange.integers.gather(best).amax(dim=0))
    return token_ids
