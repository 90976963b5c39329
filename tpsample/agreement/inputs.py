"""Checks of hidden states, and of logits that the caller computed in place of their product."""

from __future__ import annotations

from torch import Tensor

from tpsample.agreement.arguments import WEIGHT_DTYPES
from tpsample.core.checks import describe, fits, require_plain
from tpsample.core.vocab_shard import VocabShard


def check_hidden_states(
    hidden_states: Tensor, weight: Tensor, leading: tuple[int, int] | None = None
) -> None:
    """Check that these are hidden states [B, D]; with `leading` [B, K + 1, D] of drafts."""
    if weight.shape[1] == 0:
        raise ValueError(
            "hidden_states: this sampler has no weight, lm_head_weight is "
            f"{list(weight.shape)}; call sample_logits, or build it over the LM head"
        )
    if leading is not None:
        _check_of_drafts("hidden_states", hidden_states, leading, weight.shape[1])
    require_plain("hidden_states", hidden_states)
    if not isinstance(hidden_states, Tensor) or (hidden_states.ndim != 2 and leading is None):
        way_out = {
            1: "; one row is hidden_states.unsqueeze(0)",
            3: "; pass those of the last position, hidden_states[:, -1]",
        }.get(getattr(hidden_states, "ndim", 0), "")
        raise ValueError(
            f"hidden_states: expected a tensor [B, {weight.shape[1]}], "
            f"got {describe(hidden_states)}{way_out}"
        )
    if hidden_states.shape[-1] != weight.shape[1]:
        way_out = ""
        if hidden_states.shape[-1] == weight.shape[0]:
            way_out = (
                "; lm_head_weight seems to be [D, V_local]: build the sampler of "
                "lm_head_weight.T.contiguous()"
            )
        raise ValueError(
            f"hidden_states: expected D = {weight.shape[1]} columns as lm_head_weight has, "
            f"got {describe(hidden_states)}{way_out}"
        )
    if hidden_states.dtype != weight.dtype or hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states: expected {weight.dtype} on {weight.device} like lm_head_weight, "
            f"got {describe(hidden_states)}; convert with .to(lm_head_weight)"
        )
    if hidden_states.shape[-1] > 1 and hidden_states.stride(-1) != 1:
        raise ValueError(
            f"hidden_states: expected a contiguous last axis, got strides "
            f"{hidden_states.stride()}; call .contiguous()"
        )


def check_local_logits(
    local_logits: Tensor,
    weight: Tensor,
    shard: VocabShard,
    leading: tuple[int, int] | None = None,
) -> None:
    """Check that these are logits of a rank's shard; with `leading` [B, K + 1, …] of drafts."""
    own = len(shard)
    if leading is not None:
        _check_of_drafts("local_logits", local_logits, leading, own)
        local_logits = local_logits.flatten(0, 1)
    require_plain("local_logits", local_logits)
    widths = own, weight.shape[0]
    if not any(fits(local_logits, WEIGHT_DTYPES, ("B", n), weight.device) for n in widths):
        padded = "" if own == weight.shape[0] else f" or [B, {weight.shape[0]}]"
        raise ValueError(
            f"local_logits: expected fp32, bf16 or fp16 [B, {own}]{padded} on {weight.device}, the "
            f"columns of {shard}, got {describe(local_logits)}"
        )
    if local_logits.shape[1] > 1 and local_logits.stride(1) != 1:
        raise ValueError(
            f"local_logits: expected a contiguous last axis, got strides {local_logits.stride()}; "
            "call .contiguous()"
        )


def _check_of_drafts(name: str, given: Tensor, leading: tuple[int, int], width: int) -> None:
    if not isinstance(given, Tensor) or given.shape[:-1] != leading:
        raise ValueError(
            f"{name}: expected {[*leading, width]}, those of the token before the drafts and "
            f"of each draft, for draft_token_ids {[leading[0], leading[1] - 1]}; "
            f"got {describe(given)}"
        )
