"""Draws of a drafter from its own sharded logits, in the stream that the verification expects."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.agreement.step import Call
from tpsample.agreement.step_checks import check_batch, positions_tensor
from tpsample.core import word
from tpsample.core.checks import describe, require_plain
from tpsample.core.row_noise import RowNoise
from tpsample.core.score import score
from tpsample.noise import DOMAIN_TOKEN, tile_noise
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler
from tpsample.speculative.checks import METHODS
from tpsample.speculative.streams import DOMAIN_DRAFT, stream


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
        TypeError, ValueError: a wrong argument, before anything is sent.
        RankMismatch: (a ValueError) in place of these, on every rank.
    """

    def check() -> Call:
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**31:
            raise ValueError(f"index: expected an int from 0 to 2^31 - 1, got {index!r}")
        _check_logits(sampler, draft_logits)
        check_batch(batch, sampler.vocab_size, sampler.weight.device)
        sampler.ranks.require_group("sample_draft")
        rows = draft_logits.shape[0]
        at = positions_tensor(positions, rows, draft_logits.device)
        # Its filters, masks and penalties do not count here.
        sampler.checks.ready()
        counted = batch.for_rows(rows) if isinstance(batch, SamplingBatch) else batch.view(rows)
        return Call(
            f"sample_draft {method}",
            rows,
            counted,
            at,
            index,
            seeds_drawn=sampler.checks.seeds.drawn,
        )

    with sampler.agreement.leaving_on_error():
        call = sampler.agreement.settle(check)
        settled, at = call.batch, call.positions
        assert settled is not None and at is not None
        domain = DOMAIN_TOKEN if method == "coupled" else DOMAIN_DRAFT
        place = 0 if method == "coupled" else index
        streams = stream(settled.seed.unsqueeze(1), at.unsqueeze(1), place, domain)
        best = at.new_zeros(call.rows)
        if draft_logits.shape[1]:
            first_id, rounds = sampler.shard.start, sampler.philox_rounds
            row_noise = RowNoise(settled.temperature, settled.seed, at, 1, rounds)
            noise = tile_noise(streams, first_id, draft_logits.shape[1], rounds)
            scores = score(draft_logits.detach().float(), noise, row_noise)
            ids = torch.arange(first_id, sampler.shard.stop, device=at.device)
            best = word.pack(scores, ids).amax(dim=1)
        token_ids, _ = word.decode(sampler.ranks.gather_integers(best).amax(dim=0))
        return token_ids


def _check_logits(sampler: LMHeadSampler, draft_logits: Tensor) -> None:
    require_plain("draft_logits", draft_logits)
    shard, device = sampler.shard, sampler.weight.device
    if (
        not isinstance(draft_logits, Tensor)
        or draft_logits.ndim != 2
        or draft_logits.shape[1] != len(shard)
        or not draft_logits.is_floating_point()
        or draft_logits.device != device
    ):
        raise ValueError(
            f"draft_logits: expected floats [B, {len(shard)}] on {device}, the columns of {shard}, "
            f"got {describe(draft_logits)}"
        )
