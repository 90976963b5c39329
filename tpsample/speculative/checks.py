"""What a verification can check of its arguments without reading the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.agreement.step_checks import check_batch, check_fits_weight
from tpsample.core.checks import describe, require_plain
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler

METHODS = ("coupled", "rejection", "block")


def check_verify(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    draft_token_ids: Tensor,
    batch: object,
    method: str,
    draft: Tensor | None,
) -> None:
    """Raise before anything is sent.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    device = sampler.weight.device
    if not isinstance(batch, SamplingBatch):
        raise TypeError(f"batch: expected a SamplingBatch, got {type(batch).__name__}")
    check_batch(batch, sampler.vocab_size, device)
    if (
        not isinstance(draft_token_ids, Tensor)
        or draft_token_ids.ndim != 2
        or draft_token_ids.dtype != torch.int64
        or draft_token_ids.device != device
    ):
        raise ValueError(
            f"draft_token_ids: expected an int64 tensor [B, K] on {device}, "
            f"got {describe(draft_token_ids)}"
        )
    rows, drafts = draft_token_ids.shape
    shape = (rows, drafts + 1, sampler.weight.shape[1])
    if not isinstance(hidden_states, Tensor) or hidden_states.shape != shape:
        raise ValueError(
            f"hidden_states: expected {list(shape)}, those of the token before the drafts and of "
            f"each draft, for draft_token_ids {[rows, drafts]}; got {describe(hidden_states)}"
        )
    require_plain("hidden_states", hidden_states)
    check_fits_weight(hidden_states, sampler.weight)
    if rows * (drafts + 1) > sampler.max_rows:
        raise ValueError(
            f"hidden_states: {rows} rows × {drafts + 1} positions exceed "
            f"max_rows={sampler.max_rows}; build the sampler with a larger max_rows"
        )
    if draft is not None:
        _check_draft(sampler, draft, rows, drafts, method)


def _check_draft(
    sampler: LMHeadSampler, draft: Tensor, rows: int, drafts: int, method: str
) -> None:
    if method == "coupled":
        raise ValueError(
            'draft: method="coupled" looks at no draft probabilities; leave it out, or choose '
            '"rejection" or "block"'
        )
    device = sampler.weight.device
    shape = (rows, drafts, len(sampler.shard))
    if (
        not isinstance(draft, Tensor)
        or draft.shape != shape
        or not draft.is_floating_point()
        or draft.device != device
    ):
        raise ValueError(
            f"draft: expected the drafter's logits {list(shape)} on {device}, the columns of "
            f"{sampler.shard}, got {describe(draft)}"
        )
