"""Checks of a verification's and a draft's arguments, which do not read the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from tpsample.agreement.logits_checks import check_has_weight, check_local_logits
from tpsample.agreement.step_checks import check_batch, check_fits_weight
from tpsample.core.checks import describe, fits, require_plain
from tpsample.request.step_batch import StepBatch
from tpsample.sampler import LMHeadSampler

Method = Literal["coupled", "rejection", "block"]
"""How drafts are accepted; see `tpsample.speculative.verify`."""


def check_request(sampler: LMHeadSampler, method: str, batch: object) -> None:
    """Check the arguments that a draft and its verification share."""
    if method not in get_args(Method):
        raise ValueError(f"method: expected one of coupled, rejection, block, got {method!r}")
    if not isinstance(batch, StepBatch):
        raise TypeError(f"batch: expected a SamplingBatch, got {type(batch).__name__}")
    check_batch(batch, sampler.vocab_size, sampler.weight.device)


def check_verify(
    sampler: LMHeadSampler,
    hidden_states: Tensor,
    draft_token_ids: Tensor,
    batch: object,
    method: str,
    draft: Tensor | None,
    lengths: Tensor | None,
) -> None:
    """Check what `verify` is given; a TypeError or ValueError names the argument."""
    _check_drafts(sampler, draft_token_ids, batch, method, lengths)
    sampler.checks.weight_is_current()
    check_has_weight(sampler.weight)
    num_rows, num_drafts = draft_token_ids.shape
    shape = (num_rows, num_drafts + 1, sampler.weight.shape[1])
    if not isinstance(hidden_states, Tensor) or hidden_states.shape != shape:
        raise ValueError(
            f"hidden_states: expected {list(shape)}, those of the token before the drafts and of "
            f"each draft, for draft_token_ids {[num_rows, num_drafts]}; "
            f"got {describe(hidden_states)}"
        )
    require_plain("hidden_states", hidden_states)
    check_fits_weight(hidden_states, sampler.weight)
    _check_sizes("hidden_states", (num_rows, num_drafts), sampler, method, draft)


def check_verify_logits(
    sampler: LMHeadSampler,
    local_logits: Tensor,
    draft_token_ids: Tensor,
    batch: object,
    method: str,
    draft: Tensor | None,
    lengths: Tensor | None,
) -> None:
    """Check what `verify_logits` is given; a TypeError or ValueError names the argument."""
    _check_drafts(sampler, draft_token_ids, batch, method, lengths)
    num_rows, num_drafts = draft_token_ids.shape
    leading = (num_rows, num_drafts + 1)
    if not isinstance(local_logits, Tensor) or local_logits.shape[:-1] != leading:
        raise ValueError(
            f"local_logits: expected [{num_rows}, {num_drafts + 1}, {len(sampler.shard)}], those "
            f"of the token before the drafts and of each draft, got {describe(local_logits)}"
        )
    check_local_logits(local_logits.flatten(0, 1), sampler.weight, sampler.shard)
    _check_sizes("local_logits", (num_rows, num_drafts), sampler, method, draft)


def _check_drafts(
    sampler: LMHeadSampler,
    draft_token_ids: Tensor,
    batch: object,
    method: str,
    lengths: Tensor | None,
) -> None:
    check_request(sampler, method, batch)
    device = sampler.weight.device
    if not fits(draft_token_ids, torch.int64, "BK", device):
        raise ValueError(
            f"draft_token_ids: expected an int64 tensor [B, K] on {device}, "
            f"got {describe(draft_token_ids)}"
        )
    num_rows = draft_token_ids.shape[0]
    of_rows = [fits(lengths, each, (num_rows,), device) for each in (torch.int32, torch.int64)]
    if lengths is not None and not any(of_rows):
        raise ValueError(
            f"lengths: expected an int32 or int64 tensor [{num_rows}] on {device}, got "
            f"{describe(lengths)}"
        )


def _check_sizes(
    name: str,
    drafts: tuple[int, int],
    sampler: LMHeadSampler,
    method: str,
    draft: Tensor | None,
) -> None:
    """Check that the rows of the argument called `name` fit, and the drafter's logits.

    Args:
        drafts: B and K.
    """
    num_rows, num_drafts = drafts
    if num_rows * (num_drafts + 1) > sampler.max_rows:
        raise ValueError(
            f"{name}: {num_rows} rows × {num_drafts + 1} positions exceed "
            f"max_rows={sampler.max_rows}; build the sampler with a larger max_rows"
        )
    if draft is not None and method == "coupled":
        raise ValueError(
            'draft: method="coupled" looks at no draft probabilities; leave it out, or choose '
            '"rejection" or "block"'
        )
    if draft is not None:
        check_draft_logits("draft", draft, (num_rows, num_drafts), sampler)


def check_draft_logits(
    name: str, logits: Tensor, leading: Sequence[int | str], sampler: LMHeadSampler
) -> None:
    """Check logits whose last axis is this rank's shard.

    Args:
        leading: the sizes of the other axes; a letter stands for any size.
    """
    require_plain(name, logits)
    shard, device = sampler.shard, sampler.weight.device
    shape = (*leading, len(shard))
    if not fits(logits, None, shape, device):
        raise ValueError(
            f"{name}: expected the drafter's logits [{', '.join(map(str, shape))}] on {device}, "
            f"the columns of {shard}, got {describe(logits)}"
        )
