"""Checks of a verification's and a draft's arguments, which do not read the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tpsample.agreement.step_checks import check_batch
from tpsample.core import word
from tpsample.core.checks import describe, fits, require_plain
from tpsample.request.step import Inputs
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
    check_batch(batch, sampler.settings)


class Drafts(NamedTuple):
    """The drafts of a verification, with their lengths and laws.

    Attributes:
        token_ids: int64 [B, K].
        lengths: int32 or int64 [B], or None.
        law: [B, K, V_local], the drafter's logits; None if the drafts were certain.
    """

    token_ids: Tensor
    lengths: Tensor | None
    law: Tensor | None

    def known(self) -> Tensor:
        """Return int64 [B, K], the drafts, -1 after each row's last as its length has it."""
        ids = self.token_ids
        if self.lengths is None:
            return ids
        place = torch.arange(ids.shape[1], device=ids.device)
        return ids.where(place < self.lengths.unsqueeze(1), word.NO_TOKEN)


def check_verify(
    sampler: LMHeadSampler, inputs: Inputs, drafts: Drafts, batch: object, method: str
) -> None:
    """Check the arguments of `verify` or `verify_logits`; an error names the argument."""
    check_request(sampler, method, batch)
    device, lengths = sampler.weight.device, drafts.lengths
    if not fits(drafts.token_ids, (torch.int64,), "BK", device):
        raise ValueError(
            f"draft_token_ids: expected an int64 tensor [B, K] on {device}, "
            f"got {describe(drafts.token_ids)}"
        )
    num_rows, num_drafts = drafts.token_ids.shape
    whole = torch.int32, torch.int64
    if lengths is not None and not fits(lengths, whole, (num_rows,), device):
        raise ValueError(
            f"lengths: expected an int32 or int64 tensor [{num_rows}] on {device}, got "
            f"{describe(lengths)}"
        )
    sampler.checks.inputs(inputs, (num_rows, num_drafts + 1))
    if num_rows * (num_drafts + 1) > sampler.max_rows:
        raise ValueError(
            f"{inputs.name}: {num_rows} rows × {num_drafts + 1} positions exceed "
            f"max_rows={sampler.max_rows}; build the sampler with a larger max_rows"
        )
    if drafts.law is not None and method == "coupled":
        raise ValueError(
            'draft: method="coupled" looks at no draft probabilities; leave it out, or choose '
            '"rejection" or "block"'
        )
    if drafts.law is not None:
        check_draft_logits("draft", drafts.law, (num_rows, num_drafts), sampler)


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
    if not fits(logits, (), shape, device):
        raise ValueError(
            f"{name}: expected the drafter's logits [{', '.join(map(str, shape))}] on {device}, "
            f"the columns of {shard}, got {describe(logits)}"
        )
