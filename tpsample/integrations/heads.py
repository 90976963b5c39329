"""The LM head of an engine's model: what it is given is kept, and sampled without a gather.

Where an engine would make logits, its adapter keeps the input of the LM head. It hands on a tensor
[rows, 0], which nobody can take for logits. The engine's sampler brings that tensor back to
`consume`, and receives what was kept for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tpsample import reference
from tpsample.agreement.construction import cpu_backend
from tpsample.core.sealed import Sealed
from tpsample.core.version import __version__
from tpsample.core.vocab_shard import VocabShard
from tpsample.sampler import LMHeadSampler


class HeadTap(Sealed):
    """The LM head of one model on one rank.

    Attributes:
        lm_head: the engine's layer, as its last forward pass was given it.
        bias: the bias that it was given with the layer.
        replace: is called with the hidden states of each forward pass, and returns those to use.
        compared: whether the tokens are compared with the definition's, which knows the requests
            and nothing beside them.
    """

    def __init__(self) -> None:
        self.lm_head: Any = None
        self.bias: Tensor | None = None
        self.replace: Callable[[Tensor], Tensor] = _unchanged
        self.compared = False
        self._kept: Tensor | None = None
        self._weight: Tensor | None = None
        self._sampler: LMHeadSampler | None = None

    @property
    def sampler(self) -> LMHeadSampler:
        """The sampler over this rank's rows of the vocabulary, which `build` made."""
        assert self._sampler is not None
        return self._sampler

    def build(self, engine: str, logger: logging.Logger, weight: Tensor, **options: Any) -> None:
        """Make the sampler, and say so in the engine's log. Collective.

        Args:
            weight: [V_local, D], or [V_local, 0] for a head that makes its logits itself.
            options: of `LMHeadSampler`, beside the shard.
        """
        rows, self._weight = self.lm_head.shard_indices, weight
        self._sampler = LMHeadSampler(
            weight,
            shard=VocabShard(rows.org_vocab_start_index, rows.org_vocab_end_index),
            # TRITON_INTERPRET is there for the engine's own kernels, if it is set.
            **{"backend": cpu_backend() if weight.device.type == "cpu" else "auto", **options},
        )
        logger.info("tpsample %s samples, not %s: %r", __version__, engine, self.sampler)

    def capture(self, lm_head: Any, bias: Tensor | None, given: Tensor) -> Tensor:
        """Keep what a forward pass gave to the layer, a row each, and return [rows, 0] for it."""
        self.lm_head, self.bias, self._kept = lm_head, bias, given
        return given.new_empty(len(given), 0)

    def consume(self, handed: Tensor) -> Tensor:
        """Return what was kept for a tensor that `capture` returned, once.

        Raises:
            RuntimeError: it is not the last such tensor, or it was taken before.
        """
        kept, self._kept = self._kept, None
        if kept is None or tuple(handed.shape) != (len(kept), 0):
            there = "nothing" if kept is None else f"{len(kept)} rows"
            raise RuntimeError(
                f"logits: expected the [rows, 0] that the LM head returned last, got "
                f"{list(handed.shape)} with {there} kept"
            )
        return kept

    @contextmanager
    def given(
        self, replace: Callable[[Tensor], Tensor], *, compared: bool = False
    ) -> Iterator[None]:
        """Replace the hidden states that the head is given, while a self-test lasts."""
        self.replace, self.compared = replace, compared
        try:
            yield
        finally:
            self.replace, self.compared = _unchanged, False

    def logits_of_identity(self, rows: int) -> Tensor:
        """Return fp32 [rows, V_local]: the definition's logits of rows of the identity."""
        sampler, count = self.sampler, len(self.sampler.shard)
        head = sampler.settings.head
        return reference.logits(
            torch.eye(rows, device=sampler.weight.device),
            sampler.weight[:count, :rows],
            bias=None if self.bias is None else self.bias[:count],
            logit_scale=head.logit_scale,
            logit_softcap=head.logit_softcap,
        )

    def rebind_weight(self) -> None:
        """Let the sampler read a weight that the engine has put in the place of the one it read.

        Raises:
            ValueError: it has another shape, dtype, device or layout.
        """
        if self.lm_head.weight is not self._weight:
            self.sampler.refresh(self.lm_head.weight)
            self._weight = self.lm_head.weight


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states


def is_quantised(lm_head: Any) -> bool:
    """Return whether the layer is more than a product with its weight."""
    plain = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
    return type(lm_head.quant_method).__name__ not in plain
