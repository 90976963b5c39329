"""Checks of the caller's logits: they are no probabilities, and include the head's own steps."""

from __future__ import annotations

from torch import Tensor

from tpsample.core.checks import describe
from tpsample.core.tensors import readable
from tpsample.request.step import Inputs
from tpsample.settings import Settings

LOOKS = 3
"""How many tensors of each argument are checked for probabilities."""
ROUNDED = 1e-2
"""How far from 1 a sum of probabilities in bf16 may be."""
FEW_COLUMNS = 16
"""Rows with fewer numbers are not checked: 0 and 1 may be two logits or two probabilities."""


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

        This reads tensors of a CPU alone, where it need not wait. Rows of logits hardly ever lie in
        [0, 1] and sum to 1, or to less on a part of the vocabulary.

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
