"""Sampling from logits that the caller computed: everything of a step but the product."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tpsample.agreement.step import StepAgreement
from tpsample.agreement.step_checks import StepChecks
from tpsample.errors import UnsupportedParameter
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchView
from tpsample.request.step import Step


class FromLogits(ABC):
    """The part of `LMHeadSampler` that takes a rank's own logits in place of hidden states.

    It serves heads that no weight describes: a quantised head, LoRA on the head, a head computed in
    another dtype, processors of the caller's own.
    """

    checks: StepChecks
    agreement: StepAgreement

    @abstractmethod
    def begin(
        self,
        hidden_states: Tensor,
        batch: BatchView,
        positions: Tensor,
        out: SampleOutput,
        local_logits: Tensor | None = None,
    ) -> Step:
        """Compute this rank's words of a call that is settled, and hand them to the exchange."""

    @abstractmethod
    def finish(self, step: Step) -> SampleOutput:
        """Wait for every rank's words, and return the tokens."""

    def sample_logits(
        self,
        local_logits: Tensor,
        batch: SamplingBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> SampleOutput:
        """Sample one token per row from this rank's logits, which nobody gathers.

        Collective, with every other promise of a call with hidden states: for the same logits the
        tokens are the same, bit for bit. Controls, filters, logprobs, noise and the exchange are
        ours. The product is the caller's, and so are `logit_scale`, `logit_softcap` and `bias` of
        the sampler, which are not applied here.

        Args:
            local_logits: fp32, bf16 or fp16 [B, V_local], the columns of this rank's shard, last
                axis contiguous. They are converted to fp32, which is exact. There may be as many
                columns as lm_head_weight has rows; those behind the shard are never read.
            batch, positions, num_samples, out: as in a call with hidden states.

        Returns:
            Tokens and status, the same on every rank.

        Raises:
            As a call with hidden states; UnsupportedParameter inside torch.compile, too.
        """
        return self.finish(
            self.start_logits(local_logits, batch, positions, num_samples=num_samples, out=out)
        )

    def start_logits(
        self,
        local_logits: Tensor,
        batch: SamplingBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> Step:
        """Do the first half of `sample_logits`: all but waiting for the other ranks."""
        if torch.compiler.is_compiling():
            raise UnsupportedParameter("sample_logits: not inside torch.compile; call it outside")
        with self.agreement.leaving_on_error():
            call = self.agreement.settle(
                lambda: self.checks.logits_step(local_logits, batch, positions, num_samples, out)
            )
            assert call.positions is not None
            out = SampleOutput.empty(call.view.seed, num_samples) if out is None else out
            given = local_logits.detach()
            return self.begin(given[:, :0], call.view, call.positions, out, given)
