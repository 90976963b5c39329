"""A step of a sampler in two halves, from hidden states or from logits that the caller computed.

They are apart for several ranks in one process (`tpsample.ranks.virtual`), which all start before
one of them can finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tpsample.agreement.desync import DesyncDetector
from tpsample.agreement.step import Call, StepAgreement
from tpsample.agreement.step_checks import StepChecks
from tpsample.core.step_buffer import capturing
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import UnsupportedParameter
from tpsample.exchange.base import Exchange
from tpsample.local.backend import Backend
from tpsample.logits.finish import finish_logits, shard_logits
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.batch import SamplingBatch
from tpsample.request.plan import BatchView
from tpsample.request.step import Step


class Steps:
    """The halves of a step; `LMHeadSampler` builds what they need.

    Attributes:
        checks: makes a call of the arguments, or raises.
        agreement: compares the call with those of the other ranks.
        local: computes this rank's words.
        exchange: merges and decodes them.
    """

    weight: Tensor
    shard: VocabShard
    backend: Literal["triton", "torch"]
    ranks: Ranks
    on_failed: int
    checks: StepChecks
    agreement: StepAgreement
    local: Backend
    exchange: Exchange
    _desync: DesyncDetector
    _captured: list[Step]

    def start(
        self,
        hidden_states: Tensor,
        batch: SamplingBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> Step:
        """Do the first half of a call: all but waiting for the other ranks.

        Every start is followed by its `finish`. The halves are apart for several ranks in one
        process (`tpsample.ranks.virtual`).
        """
        return self._start(
            lambda: self.checks.step(hidden_states, batch, positions, num_samples, out),
            num_samples,
            out,
            hidden_states=hidden_states,
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
        return self._start(
            lambda: self.checks.logits_step(local_logits, batch, positions, num_samples, out),
            num_samples,
            out,
            local_logits=local_logits,
        )

    def _start(
        self,
        check: Callable[[], Call],
        num_samples: int | None,
        out: SampleOutput | None,
        *,
        hidden_states: Tensor | None = None,
        local_logits: Tensor | None = None,
    ) -> Step:
        """Settle a step from either of two inputs with the other ranks, and begin it."""
        with self.agreement.leaving_on_error():
            call = self.agreement.settle(check)
            assert call.positions is not None
            out = SampleOutput.empty(call.view.seed, num_samples) if out is None else out
            if hidden_states is not None:
                return self.begin(hidden_states.detach(), call.view, call.positions, out)
            assert local_logits is not None
            given = local_logits.detach()
            return self.begin(given[:, :0], call.view, call.positions, out, given)

    def begin(
        self,
        hidden_states: Tensor,
        batch: BatchView,
        positions: Tensor,
        out: SampleOutput,
        local_logits: Tensor | None = None,
    ) -> Step:
        """Compute this rank's words of a call that is settled, and hand them to the exchange."""
        out.logprobs, out.kept = None, None
        samples = out.num_samples
        step = self.local.prepare(hidden_states, batch, positions, samples, out, local_logits)
        if capturing(self.weight.device):
            self._captured.append(step)
        if batch.rows:
            self.exchange.begin()
            parts, push = self.exchange.parts, self.exchange.push
            for part in range(parts):
                words = self.exchange.own_words(part)[: step.num_words]
                self.local.best_words(step, words, part, parts, push)
                self.exchange.publish(part, step.num_words)
        return step

    def finish(self, step: Step) -> SampleOutput:
        """Do the second half of a call: wait for every rank's words, and return the tokens."""
        out, plan = step.out, step.batch.plan
        assert out is not None
        if step.batch.rows:
            with self.agreement.leaving_on_error():
                self.exchange.finish(out, step.batch.seed)
                if plan.stored_index is not None:
                    stored = shard_logits(step, self.shard, self.backend)
                    finish_logits(stored, step, self.ranks, self.on_failed)
                self._desync.add(step.noise.positions, out)
        return out

    def forget_step(self) -> None:
        """Let go of the tensors of the last step; `compare` cannot look at it any more."""
        self._desync.forget_step()
