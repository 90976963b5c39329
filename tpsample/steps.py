"""A step of a sampler in two halves, from hidden states or from logits that the caller computed.

They are apart for several ranks in one process (`tpsample.ranks.virtual`), which all start before
one of them can finish.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpsample.agreement.arguments import ChosenBackend
from tpsample.agreement.desync import DesyncDetector
from tpsample.agreement.step import Call, StepAgreement
from tpsample.agreement.step_checks import StepChecks
from tpsample.core.checks import check_int
from tpsample.core.sealed import Sealed
from tpsample.core.step_buffer import capturing
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.errors import UnsupportedParameter
from tpsample.exchange.base import Exchange
from tpsample.local.backend import Backend
from tpsample.logits.finish import finish_logits, shard_logits
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.batch import SamplingBatch
from tpsample.request.changes import Changes
from tpsample.request.plan import BatchView
from tpsample.request.step import Step
from tpsample.request.step_batch import StepBatch

COUNTS_ON = ("cpu",)
"""The devices whose memory the host reads without waiting."""


class Steps(Sealed):
    """The halves of a step; `LMHeadSampler` builds what they need.

    Attributes:
        checks: makes a call of the arguments, or raises.
        agreement: compares the call with those of the other ranks.
        local: computes this rank's words.
        exchange: merges and decodes them.
    """

    weight: Tensor
    shard: VocabShard
    backend: ChosenBackend
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
        batch: StepBatch | BatchView,
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
        batch: StepBatch | BatchView,
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
            call = self.agreement.settle(check, words_follow=True)
            assert call.positions is not None
            if isinstance(call.batch, StepBatch):
                call.batch.note_step(call.positions)
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
        out = self.end(step)
        if self.on_failed != NO_TOKEN:
            out.name_failed(self.on_failed)
        self.count_own(out.status)
        return out

    def end(self, step: Step) -> SampleOutput:
        """Wait for every rank's words of what `begin` began; the token of a failed row is -1."""
        out, plan = step.out, step.batch.plan
        assert out is not None
        with self.agreement.leaving_on_error():
            self.agreement.compare()
            out.logprobs = out.kept = None
            if step.batch.rows:
                self.exchange.finish(out, step.batch.seed)
                if plan.stored_index is not None:
                    stored = shard_logits(step, self.shard, self.backend)
                    finish_logits(stored, step, self.ranks)
                if step.batch.undrawn is not None:
                    out.name_undrawn(*step.batch.undrawn)
                self._desync.add(step.noise.positions, out, step.hidden_states)
        return out

    def counters(self) -> dict[str, int]:
        """Return what this rank has counted since the sampler was built, for an engine's metrics.

        The names and what each counts are those of `tpsample.core.counters.Counters`. Nothing is
        sent, and the device is not waited for.
        """
        return self.ranks.counters.numbers()

    def count_failed(self, status: Tensor) -> None:
        """Count the failed rows of a status that the caller has read from a GPU.

        On a CPU every step does so itself, because its status is on the host.

        Args:
            status: int32 [B], of a `SampleOutput` or a `VerifyOutput`.
        """
        of_rows = status.tolist()
        self.ranks.counters.failed_rows += len(of_rows) - of_rows.count(0)

    def count_own(self, status: Tensor) -> None:
        """Count the failed rows of a call, where the host reads them without waiting."""
        if status.device.type in COUNTS_ON:
            self.count_failed(status)

    def broadcast(
        self, batch: SamplingBatch, changes: Changes | None = None, *, src: int = 0
    ) -> None:
        """Make on every rank the changes of a batch that one rank knows of. Collective.

        It is for engines in which one rank alone has the requests. Each rank has the same batch,
        empty at first, which nobody changes in another way. Where each of several ranks knows some
        of the rows, they call it once per rank. The host waits for the other ranks.

        Args:
            changes: on rank `src`; what the other ranks bring is not looked at.
            src: the rank, of this sampler's, that knows.

        Raises:
            TypeError, ValueError: what the batch refuses, on every rank alike. Changes before the
                refused one are made.
            UnsupportedParameter: (a ValueError) several ranks have no process group.
        """
        self.checks.ready()
        check_int("src", src, 0, self.ranks.world_size - 1)
        self.ranks.require_group("broadcast")
        with self.agreement.leaving_on_error():
            known = changes.as_json() if isinstance(changes, Changes) else None
            record = {"changes": known, "got": type(changes).__name__}
            record = self.ranks.broadcast(record, src)
        if record["changes"] is None:
            raise TypeError(f"changes: expected Changes on rank {src}, got {record['got']}")
        Changes.make(batch, record["changes"])

    def draw_seeds(self, batch: StepBatch) -> None:
        """Give the rows of a batch that wait for a seed theirs, as the next step would.

        Every rank calls at the same point, because all derive them in order from one random number.
        Nothing is sent. A replay of a captured graph draws none.
        """
        self.checks.ready()
        batch.draw_seeds(self.checks.seeds)

    def forget_step(self) -> None:
        """Let go of the tensors of the last step; `compare` cannot look at it any more."""
        self._desync.forget_step()
