"""A model that is tensor-parallel as a whole, for `tpsample generate --tp`.

transformers splits the heads and widths of every layer, the embedding and the LM head over the
ranks. Each rank then computes its part of the hidden states, which an all-reduce per layer sums. So
their last bits depend on the number of ranks. The tokens are exact for the hidden states as they
are.
"""

from __future__ import annotations

import math
import os
from typing import Any

from tpsample.distributed import Job
from tpsample.integrations import check_version


def loading(name: str, config: Any, job: Job) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that split a model over the ranks of a job.

    Nothing is sent or loaded here, and every rank comes to the same conclusion.

    Args:
        name: of the model, for messages.
        config: the model's, read before its weights.

    Raises:
        ValueError: this model cannot be split over so many ranks, or not by this transformers.
    """
    import transformers

    if job.world_size == 1:
        return {}
    try:
        check_version("transformers", transformers.__version__)
    except ImportError as error:
        raise ValueError(f"tp: {error}") from error
    from transformers.distributed import DistributedConfig

    check_model(name, config.get_text_config(), job.world_size)
    # On a GPU transformers asks torchrun's variable which one is this rank's.
    os.environ.setdefault("LOCAL_RANK", str(job.local_rank))
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=job.world_size)}


def check_model(name: str, config: Any, world_size: int) -> None:
    """Raise a ValueError for a model that `world_size` ranks cannot split, which says who can."""
    instead = "leave --tp out: every rank then has the whole trunk, and a shard of the LM head"
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"tp: transformers has no plan to split {name} ({config.model_type}); {instead}"
        )
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    common = math.gcd(*_counts(heads), *_counts(key_value_heads))
    if common % world_size == 0:
        return
    able = ", ".join(str(ranks) for ranks in range(2, common + 1) if common % ranks == 0)
    way_out = f"start {able} ranks, or {instead}" if able else instead
    raise ValueError(
        f"tp: {name} has {heads} attention heads and {key_value_heads} key-value heads, which "
        f"{world_size} ranks cannot share evenly; {way_out}"
    )


def _counts(heads: Any) -> list[int]:
    """Return a number of heads, or those of each layer, as a list."""
    return [heads] if isinstance(heads, int) else list(heads)
