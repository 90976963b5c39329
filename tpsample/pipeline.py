"""The stages of a sampler, and a step in two halves.

hidden states, or logits of the caller → checked on all ranks → words → exchange → tokens

A step has two halves because tests run several ranks in one process. There every rank starts
before the first one can finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from tpsample.agreement.caller_tensors import CallerTensors
from tpsample.agreement.desync import DesyncDetector
from tpsample.agreement.step import StepAgreement
from tpsample.agreement.step_checks import StepChecks
from tpsample.backends import room_of
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core.caller_warning import warn
from tpsample.core.ranges import range_of
from tpsample.core.tensors import capturing, readable
from tpsample.core.word import NO_TOKEN, warn_of_failed
from tpsample.exchange import make_exchange
from tpsample.filters.finish import (
    candidates_of,
    draw_filtered,
    logprobs_of,
    shard_logits,
)
from tpsample.filters.kept_sets import Cut, kept_sets_of
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.request.moving_on import REBUILT, Rebuilt
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step import Inputs, Step
from tpsample.request.step_batch import StepBatch
from tpsample.settings import Settings

Output = TypeVar("Output", SampleOutput, VerifyOutput)


class Pipeline:
    """The stages that every step of a sampler goes through.

    Args:
        settings: of the sampler.
        given: the caller's weight and bias, by the name of the argument.

    Attributes:
        caller: the caller's weight and bias, which every call follows.
        exchange: merges and decodes words.
        local: computes this rank's words.
        checks: makes a `Call` of the arguments, or raises.
        agreement: compares the call with those of the other ranks.
        desync: compares what the ranks drew.
    """

    def __init__(self, settings: Settings, given: dict[str, Tensor | nn.Module | None]) -> None:
        self.settings, self.ranks = settings, settings.ranks
        self.exchange = make_exchange(settings)
        self.local = room_of(settings.backend).launch(settings)
        self.caller = CallerTensors(given, settings, self.local.rebind_weight)
        self.agreement = StepAgreement(self.ranks, self.exchange, settings.seeds)
        self.checks = StepChecks(settings, self.caller, self.local, self.agreement)
        self._rebuilt = Rebuilt()
        self.desync = DesyncDetector(self.ranks)
        # A captured graph reads its plan at replay. It is kept here, because a batch whose rows
        # change drops it. All else belongs to the caller, to us, or to the graph's memory pool.
        self._captured: dict[int, BatchPlan] = {}

    def start(
        self,
        inputs: Inputs,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> Step:
        """Do the first half of a step: everything before the wait for the other ranks.

        The caller calls `finish` with the result, and holds the sampler's agreement during both.
        """
        arguments = inputs, batch, positions, num_samples, out
        call = self.agreement.check_on_all_ranks(self.checks.step, *arguments, words_follow=True)
        assert call.batch is not None and call.positions is not None
        if self.agreement.steps_to_compare and self.agreement.must_compare_states(call):
            states = call.drawn_states()
            assert states is not None
            self.desync.compare_states(states, self.exchange.check)
        view = call.batch
        if isinstance(view, StepBatch):
            view._note_step(
                self, inputs.tensor, call.positions, call.position_bytes, call.num_samples
            )
            if view._lacks_output and self._rebuilt.is_forgetful(view, view.seed, call.positions):
                warn(REBUILT)
            if view._names_slots:
                self.local.read_slots(view)
            view = view._read()
        out = SampleOutput.empty(view.seed, num_samples) if out is None else out
        if isinstance(call.batch, StepBatch):
            call.batch._note_tokens(out.token_ids)
        return self.begin(inputs, view, call.positions, out, call.num_samples)

    def begin(
        self,
        inputs: Inputs,
        batch: BatchView,
        positions: Tensor,
        out: SampleOutput,
        num_samples: int = 1,
        payloads_of: Callable[[ShardLogits, Step, Tensor], list[Tensor]] = candidates_of,
    ) -> Step:
        """Compute this rank's words of a checked call, and hand them to the exchange.

        Args:
            payloads_of: returns the integers about stored rows that travel with the words.
        """
        hidden_states, local_logits = inputs.rows()
        step = self.local.prepare(hidden_states, batch, positions, num_samples, out, local_logits)
        if batch._stores_logits and batch.undrawn is None and capturing(self.settings.device):
            self._captured[id(batch.plan)] = batch.plan
        if num_words := out.token_ids.numel():
            self.ranks.counters.tokens += num_words
            exchange = self.exchange
            with range_of("head"):
                for part, words in enumerate(exchange.begin(num_words)):
                    self.local.best_words(step, words, part, exchange.parts, exchange.push)
                    if exchange.takes_payload and batch._stores_logits:
                        exchange.attach_payload(payloads_of(self.stored_logits(step), step, words))
                    exchange.publish(part, num_words)
        return step

    def finish(self, step: Step) -> SampleOutput:
        """Do the second half of a step: wait for every rank's words, and return the tokens."""
        cut, out = self.end(step), step.out
        assert out is not None
        if cut is not None:
            with range_of("filters"):
                drawn = out.token_ids.view(len(out.status), -1)[:, 0] >= 0
                out.kept = kept_sets_of(cut, step.batch, self.ranks, drawn)
        return self.count_step(out)

    def count_step(self, out: Output) -> Output:
        """Count a step, write `on_failed` into its failed rows, and return its output.

        Failed rows are counted only where the host reads the status without waiting.
        """
        counters = self.ranks.counters
        counters.steps += 1
        counters.rows += out.status.shape[0]
        if self.settings.on_failed != NO_TOKEN:
            out.fill_failed(self.settings.on_failed)
        if readable(out.status.device):
            self.count_failed(out.status)
        return out

    def end(self, step: Step) -> Cut | None:
        """Wait for every rank's words of a step from `begin`, and write its output.

        The token of a failed row is -1.

        Returns:
            Where the kept sets end if the batch has a `kept_cap`, else None.
        """
        out, batch, cut = step.out, step.batch, None
        assert out is not None
        out.logprobs, out.kept = None, None
        plain = batch.plan.stored_index is None
        exchange, written = self.exchange, (out, batch.seed, batch.undrawn)
        with range_of("exchange"):
            self.agreement.compare()
            if not out.token_ids.numel():
                return None
            words = exchange.wait(*written)
            if plain:
                exchange.finish(words, *written)
        if not plain:
            with range_of("filters"):
                rows, ranks = self.stored_logits(step), self.ranks
                filtered = draw_filtered(rows, step, ranks, exchange.payloads())
                exchange.finish(words, *written, filtered.words)
                if batch.plan.logprobs is not None:
                    out.logprobs = logprobs_of(rows, batch, ranks, out.token_ids, filtered)
                cut = filtered.cut
        self.desync.last = step.noise.positions, out.seeds, out.token_ids
        return None if batch.plan.kept_cap is None else cut

    def stored_logits(self, step: Step) -> ShardLogits:
        """Return the logits that a step stored on this rank."""
        return shard_logits(step, self.settings.shard, self.settings.backend)

    def count_failed(self, status: Tensor) -> None:
        """Count the failed rows of a status on the host, int32 [B]; warn of the first."""
        of_rows, counters = status.tolist(), self.ranks.counters
        failed = len(of_rows) - of_rows.count(0)
        before, counters.failed_rows = counters.failed_rows, counters.failed_rows + failed
        if failed and not before and self.settings.on_failed == NO_TOKEN:
            warn_of_failed(of_rows)

    def forget_step(self) -> None:
        """Release the tensors of the last step, so that `compare` no longer sees the step."""
        self.desync.last = None
