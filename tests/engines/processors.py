"""A logits processor that servers of vLLM's runner V2 are given.

--logits-processors tests.engines.processors:Bans
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from tests.engines.asked import BANNED


class Bans(LogitsProcessor):  # type: ignore[misc]
    """Forbids every third id, and halves the logits above 5."""

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Change logits [rows, V], in place and by their absolute ids."""
        logits[:, ::BANNED] = -torch.inf
        return logits.where(logits < 5, logits / 2)
