"""The LM head of a vLLM model.

Every model's `compute_logits` ends in one `LogitsProcessor`, whose forward is replaced. It keeps
the hidden states; or, where vLLM's own head is more than a product (quantised, of another dtype,
scaled after a soft-cap), its logits of this shard.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.core.weight_format import FORMATS
from tpsample.errors import UnsupportedParameter
from tpsample.integrations.heads import HeadTap, is_quantised
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.request.plan import BatchView
from tpsample.request.step_batch import StepBatch
from tpsample.speculative.verify import verify, verify_logits

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers


class VllmHead(Sealed):
    """The LM head of one model on one rank, whose sampler is built at once.

    Args:
        processor: the model's `LogitsProcessor`; its forward is replaced for good.
        runner: the model runner, whose model is asked for logits once, to see the LM head.
        group: the process group of tensor parallelism.
        depth: most positions of a request in one step: 1, and with drafts 1 + their number.
        fused: whether the sampler may multiply.
        options: of `LMHeadSampler`, such as exchange.

    Attributes:
        kept: what the LM head was given, and the sampler over its rows.
        fused: whether the sampler multiplies; else vLLM does, and the sampler takes its logits.
    """

    def __init__(
        self,
        processor: Any,
        runner: Any,
        *,
        group: Any,
        depth: int,
        fused: bool = True,
        **options: Any,
    ) -> None:
        if processor.logits_as_input:
            raise UnsupportedParameter("model: it makes its logits before its LogitsProcessor")
        self.kept = HeadTap()
        self._processor, self._forward, self.fused = processor, processor.forward, True
        processor.forward = self._stand_in
        device = runner.device
        self._hidden_size, self._dtype = runner.model_config.get_hidden_size(), runner.dtype
        with torch.inference_mode():
            probe = torch.zeros(1, self._hidden_size, dtype=self._dtype, device=device)
            self.kept.consume(runner.model.compute_logits(probe))
        lm_head = self.kept.lm_head
        self.fused = fused and _is_product(lm_head, processor)
        # A head without a weight takes logits; its rows are the columns that vLLM computes.
        padded = lm_head.num_embeddings_per_partition
        self.kept.build(
            "vLLM",
            logger,
            lm_head.weight if self.fused else torch.empty(padded, 0, device=device),
            vocab_size=processor.org_vocab_size,
            group=group,
            max_rows=runner.max_num_reqs * depth,
            bias=self.kept.bias if self.fused else None,
            logit_scale=processor.scale if self.fused else 1.0,
            logit_softcap=processor.soft_cap if self.fused else None,
            **options,
        )

    def sample(self, kept: Tensor, batch: StepBatch | BatchView, positions: Tensor) -> SampleOutput:
        """Sample a token per row of what was kept. Collective."""
        if not self.fused:
            return self.kept.sampler.sample_logits(kept.contiguous(), batch, positions)
        self.kept.rebind_weight()
        return self.kept.sampler(kept.contiguous(), batch, positions)

    def verify(
        self, kept: Tensor, drafts: Tensor, batch: StepBatch, positions: Tensor, **rule: Any
    ) -> VerifyOutput:
        """Verify drafts [B, K] by what was kept, [B, K + 1, …]. Collective.

        Args:
            rule: method and draft_logits of `tpsample.verify`.
        """
        if not self.fused:
            return verify_logits(self.kept.sampler, kept, drafts, batch, positions, **rule)
        self.kept.rebind_weight()
        return verify(self.kept.sampler, kept, drafts, batch, positions, **rule)

    def is_of(self, model: Any) -> bool:
        """Return whether a model makes its logits by the `LogitsProcessor` of this head."""
        return any(module is self._processor for module in model.modules())

    def logits_of_identity(self, rows: int) -> Tensor:
        """Return fp32 [rows, V_local]: the definition's logits of the identity, this rank's ids."""
        kept = self.kept
        if self.fused:
            return kept.logits_of_identity(rows)
        device, count = kept.sampler.weight.device, len(kept.sampler.shard)
        identity = torch.eye(rows, self._hidden_size, dtype=self._dtype, device=device)
        return self._forward(kept.lm_head, identity, kept.bias, skip_gather=True)[:, :count].float()

    def _stand_in(
        self,
        lm_head: Any,
        hidden_states: Tensor,
        embedding_bias: Tensor | None = None,
        skip_gather: bool = False,
    ) -> Tensor:
        """Stand in for the forward of the `LogitsProcessor`."""
        given = self.kept.replace(hidden_states)
        if not self.fused:
            given = self._forward(lm_head, given, embedding_bias, skip_gather=True)
        return self.kept.capture(lm_head, embedding_bias, given)


def _is_product(lm_head: Any, processor: Any) -> bool:
    """Whether logits are softcap(scale · h Wᵀ) + bias in the dtype of the weight."""
    weight = getattr(lm_head, "weight", None)
    return (
        not is_quantised(lm_head)
        and weight is not None
        and weight.dtype in FORMATS
        and weight.ndim == 2
        and weight.stride(1) == 1
        and processor.head_dtype in (None, weight.dtype)
        # vLLM scales after the soft-cap, and adds its bias before it.
        and (processor.soft_cap is None or processor.scale == 1.0)
    )


def only_processor(model: Any, kind: type) -> Any:
    """Return the `LogitsProcessor` of a model.

    Raises:
        UnsupportedParameter: it has none, several, or one that adapters of LoRA may change.
    """
    if any(isinstance(getattr(module, "base_layer", None), kind) for module in model.modules()):
        raise UnsupportedParameter(
            "--enable-lora: an adapter may change the LM head; name the layers that adapters may "
            "have, without it: --lora-target-modules q_proj k_proj v_proj o_proj"
        )
    processors = [module for module in model.modules() if isinstance(module, kind)]
    if len(processors) != 1:
        raise UnsupportedParameter(
            f"model: expected one {kind.__name__}, {type(model).__name__} has {len(processors)}"
        )
    return processors[0]
