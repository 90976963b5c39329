"""Logits that come ready-made must be logits, and the head's own steps be no surprise."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.checks import describe
from tpsample.core.tensors import readable
from tpsample.request.step import Inputs
from tpsample.settings import Settings

LOOKS = 3
"""Tensors of each argument that are looked at as possible probabilities."""
ROUNDED = 1e-2
"""How far from 1 a sum of probabilities in bf16 may be."""
FEW_COLUMNS = 16
"""Fewer numbers than these say nothing by their sum: 0 and 1 are two logits as well as two
probabilities."""


class ReadyMadeLogits:
    """Checks of `local_logits` and `draft_logits` of one sampler."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looked: dict[str, int] = {}  # how many tensors, by argument

    def check(self, inputs: Inputs) -> None:
        """Raise if logits are probabilities, or would miss the scale, soft-cap or bias of the head.

        Raises:
            TypeError, ValueError: naming the way out.
        """
        settings = self._settings
        if not isinstance(inputs.head_applied, bool):
            raise TypeError(f"head_applied: expected a bool, got {describe(inputs.head_applied)}")
        has = {
            "logit_scale": settings.head.logit_scale != 1,
            "logit_softcap": settings.head.logit_softcap is not None,
            "bias": settings.bias is not None,
        }
        if any(has.values()) and not inputs.head_applied:
            raise ValueError(
                f"{inputs.name}: the sampler has {', '.join(name for name in has if has[name])}, "
                "which logits of yours are not given; apply it to them and pass head_applied=True, "
                "or build a sampler without"
            )
        self.refuse_probabilities(inputs.name, inputs.tensor)

    def refuse_probabilities(self, name: str, logits: Tensor) -> None:
        """Raise a ValueError if one of the first tensors of an argument has probabilities.

        Only a CPU is asked, because there nobody waits. Rows of logits are hardly ever in [0, 1]
        with the sum 1, or on a part of the vocabulary with a smaller sum.

        Args:
            logits: [..., V_local].
        """
        looked = self._looked.get(name, 0)
        if looked == LOOKS or not readable(logits.device) or not logits.numel():
            return
        self._looked[name] = looked + 1
        if logits.shape[-1] < FEW_COLUMNS or bool(logits.min() < 0):
            return
        sums = logits.detach().double().sum(dim=-1)
        sums = sums[sums != 0]  # rows of zeros may stand behind the drafts of a row
        whole = len(self._settings.shard) == self._settings.vocab_size
        least = 1 - ROUNDED if whole else 0.0
        if len(sums) and bool(((sums > least) & (sums < 1 + ROUNDED)).all()):
            raise ValueError(
                f"{name}: expected logits, got numbers in [0, 1] whose rows sum to "
                f"{float(sums.max()):.3g}, as probabilities do; pass their logarithm, .log(); if "
                "they are logits, subtract 1 from all, which changes no probability"
            )
