"""Checks of logits that the caller computed, and of calls that need a weight in their place."""

from __future__ import annotations

from torch import Tensor

from tpsample.agreement.arguments import WEIGHT_DTYPES
from tpsample.core.checks import describe, require_plain
from tpsample.core.vocab_shard import VocabShard


def check_local_logits(local_logits: Tensor, weight: Tensor, shard: VocabShard) -> None:
    """Check that these are logits of a rank's shard."""
    require_plain("local_logits", local_logits)
    own = len(shard)
    if (
        not isinstance(local_logits, Tensor)
        or local_logits.ndim != 2
        or local_logits.dtype not in WEIGHT_DTYPES
        or local_logits.device != weight.device
        or local_logits.shape[1] not in (own, weight.shape[0])
    ):
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


def check_has_weight(weight: Tensor) -> None:
    """Raise a ValueError if the sampler was built to take logits alone."""
    if weight.shape[1] == 0:
        raise ValueError(
            "hidden_states: this sampler has no weight, lm_head_weight is "
            f"{list(weight.shape)}; call sample_logits, or build it over the LM head"
        )
