"""The calls of a sampler: a step in two halves, and what ranks do beside steps.

hidden states, or logits of the caller → settled with the other ranks → words → exchange → tokens

A step's halves are apart for several ranks in one process (`tpsample.ranks.virtual`), which all
start before one of them can finish.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from tpsample.agreement.caller_tensors import CallerTensors
from tpsample.agreement.desync import DesyncDetector
from tpsample.agreement.step import StepAgreement
from tpsample.agreement.step_checks import StepChecks
from tpsample.backends import make_backend
from tpsample.backends.torch_.passes import ShardLogits
from tpsample.core.ranges import range_of
from tpsample.core.sealed import Sealed
from tpsample.core.tensors import capturing, readable
from tpsample.core.word import NO_TOKEN, warn_of_failed
from tpsample.errors import PeerLost
from tpsample.exchange import make_exchange
from tpsample.filters.finish import candidates_of, finish_logits, kept_sets_of, shard_logits
from tpsample.output import SampleOutput, VerifyOutput
from tpsample.request.moving_on import REBUILT, Rebuilt
from tpsample.request.plan import BatchPlan, BatchView
from tpsample.request.step import Inputs, Step
from tpsample.request.step_batch import StepBatch
from tpsample.settings import Settings

Output = TypeVar("Output", SampleOutput, VerifyOutput)


class Steps(Sealed):
    """The stages that every call of a sampler goes through.

    Args:
        settings: of the sampler.
        given: the caller's weight and bias, by argument.

    Attributes:
        local: computes this rank's words.
        exchange: merges and decodes them.
        checks: makes a `Call` of the arguments, or raises.
        agreement: compares the call with those of the other ranks.
    """

    _FIXED: ClassVar[Mapping[str, str]] = {
        "weight": "pass another weight to refresh(lm_head_weight)",
        **dict.fromkeys(
            (
                *("settings", "ranks", "vocab_size", "shard"),
                *("backend", "max_rows", "on_failed"),
            ),
            "build a new sampler",
        ),
    }

    def __init__(self, settings: Settings, given: dict[str, Tensor | nn.Module | None]) -> None:
        self.settings, self.ranks = settings, settings.ranks
        self.weight, self.vocab_size = settings.weight, settings.vocab_size
        self.shard, self.backend = settings.shard, settings.backend
        self.max_rows, self.on_failed = settings.max_rows, settings.on_failed
        self.exchange = make_exchange(settings)
        self.local = make_backend(settings)
        self._caller = CallerTensors(given, settings, self.local.follow)
        self.checks = StepChecks(settings, self._caller, self.local)
        self.agreement = StepAgreement(self.ranks, self.exchange, settings.seeds)
        self._rebuilt = Rebuilt()
        self._desync = DesyncDetector(self.ranks)
        # Captured graphs read these at replay, and a batch whose rows change makes new ones. All
        # else is the caller's, ours, or in the graph's own memory pool, which must not outlive it.
        self._captured: dict[int, BatchPlan] = {}

    def _start(
        self,
        inputs: Inputs,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> Step:
        """Do the first half of a step: all but waiting for the other ranks.

        Every start is followed by its `_finish`. Both stand inside the sampler's agreement.
        """
        arguments = inputs, batch, positions, num_samples, out
        call = self.agreement.settle(self.checks.step, *arguments, words_follow=True)
        assert call.batch is not None and call.positions is not None
        if self.agreement.must_compare_states(call):
            states = call.drawn_states()
            assert states is not None
            self._desync.compare_states(states, self.exchange.check)
        view = call.batch
        if isinstance(view, StepBatch):
            view._note_step(self, inputs.given, call.positions, call.now, call.num_samples)
            if view._lacks_output and self._rebuilt.is_forgetful(view, view.seed, call.positions):
                warnings.warn(REBUILT, stacklevel=3)
            view = view._read()
        out = SampleOutput.empty(view.seed, num_samples) if out is None else out
        return self._begin(inputs, view, call.positions, out, call.num_samples)

    def _begin(
        self,
        inputs: Inputs,
        batch: BatchView,
        positions: Tensor,
        out: SampleOutput,
        num_samples: int = 1,
    ) -> Step:
        """Compute this rank's words of a call that is settled, and hand them to the exchange."""
        hidden_states, local_logits = inputs.rows()
        step = self.local.prepare(hidden_states, batch, positions, num_samples, out, local_logits)
        if batch._stores_logits and batch.undrawn is None and capturing(self.weight.device):
            self._captured[id(batch.plan)] = batch.plan
        if num_words := out.token_ids.numel():
            self.ranks.counters.tokens += num_words
            exchange = self.exchange
            with range_of("head"):
                for part, words in enumerate(exchange.begin(num_words)):
                    self.local.best_words(step, words, part, exchange.parts, exchange.push)
                    if exchange.carries and step.batch.plan.filters is not None:
                        exchange.carry(candidates_of(self._stored(step), step))
                    exchange.publish(part, num_words)
        return step

    def _finish(self, step: Step) -> SampleOutput:
        """Do the second half of a step: wait for every rank's words, and return the tokens."""
        out = self._end(step)
        if out.token_ids.numel() and step.batch.plan.kept_cap is not None:
            with range_of("filters"):
                out.kept = kept_sets_of(self._stored(step), step.batch, self.ranks)
        return self._counted(out)

    def _counted(self, out: Output) -> Output:
        """Return the output of a call, which names the token of failed rows as `on_failed` has it.

        The step is counted, and failed rows are where the host reads them without waiting.
        """
        counters = self.ranks.counters
        counters.steps += 1
        counters.rows += out.status.shape[0]
        if self.on_failed != NO_TOKEN:
            out.name_failed(self.on_failed)
        if readable(out.status.device):
            self.count_failed(out.status)
        return out

    def _end(self, step: Step) -> SampleOutput:
        """Wait for every rank's words of what `_begin` began; the token of a failed row is -1."""
        out, plan = step.out, step.batch.plan
        assert out is not None
        with range_of("exchange"):
            self.agreement.compare()
            if out.token_ids.numel():
                self.exchange.finish(out, step.batch.seed)
        out.logprobs, out.kept = None, None
        if out.token_ids.numel():
            if plan.stored_index is not None:
                carried = self.exchange.carried()
                with range_of("filters"):
                    finish_logits(self._stored(step), step, self.ranks, carried)
            if step.batch.undrawn is not None:
                out.name_undrawn(*step.batch.undrawn)
            self._desync.last = step.noise.positions, out.seeds, out.token_ids
        return out

    def _stored(self, step: Step) -> ShardLogits:
        return shard_logits(step, self.shard, self.backend)

    def counters(self) -> dict[str, Any]:
        """Return what this rank has counted since the sampler was built, for an engine's metrics.

        Nothing is sent, and the device is not waited for.

        Returns:
            steps: steps and verifications that ended, those of `warm_up` among them.
            rows: their rows.
            tokens: draws of a candidate: rows × samples of steps, rows × (K + 1) of verifications.
            failed_rows: rows whose status was not OK. On a CPU every step counts its own; on a GPU
                `count_failed` does, for a status that was read.
            second_rounds: filtered rows that the first candidates did not decide, so that an exact
                second round did. With `fixed_rounds` and in captured graphs the device alone knows.
            bytes_sent: bytes of payload that this rank handed to its peers.
            waited_s: seconds in which the host waited for peers; 0.0 where the device does.
            lost_ranks: the ranks that a `PeerLost` has named, ascending.
            refreshes: calls of `refresh`.
            A replay of a captured graph runs no Python, so it counts nothing.
        """
        counters = self.ranks.counters
        words = self.exchange.bytes_sent(counters.tokens) if counters.tokens else 0
        return counters.by_name() | {"bytes_sent": words + self.ranks.bytes_sent}

    def count_failed(self, status: Tensor) -> None:
        """Count the failed rows of a status that the caller has read from a GPU.

        On a CPU every step does so itself, because its status is on the host.

        Args:
            status: int32 [B], of a `SampleOutput` or a `VerifyOutput`.
        """
        of_rows, counters = status.tolist(), self.ranks.counters
        failed = len(of_rows) - of_rows.count(0)
        if failed and not counters.failed_rows and self.on_failed == NO_TOKEN:
            warn_of_failed(of_rows)
        counters.failed_rows += failed

    def check(self) -> None:
        """Raise if a rank failed to answer in an earlier step. Waits for the GPU.

        Raises:
            PeerLost: some ranks did not; it names them.
            RankMismatch: a rank refused its step; the text is that of its error.
        """
        with self.agreement.thread:
            self.checks.ready()
            try:
                self.exchange.check()
            except PeerLost as error:
                self.ranks.counters.lost_ranks.update(error.ranks)
                raise

    def compare(self, hidden_states: Tensor | None = None) -> None:
        """Raise if the ranks sampled differently in the last step.

        Collective; waits for the GPU. See `tpsample.agreement.desync`.

        Args:
            hidden_states: [B, D] of this rank, which must be the same on every rank, bit for bit.
                From others all ranks draw the same wrong tokens.

        Raises:
            Desync: ranks differ; it names those that differ from most.
            RankMismatch: another rank made another call, where ranks meet on the host.
            UnsupportedParameter: several ranks have no process group.
        """
        with self.agreement:
            self.agreement.settle(self.checks.compare, hidden_states)
            self._desync.compare(hidden_states, self.settings.device)

    def refresh(self, lm_head_weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Take the weight as it is now. Call it on every rank after a change; it is always right.

        Without `screening` it is needed in one case: the sampler was given a tensor, and another
        took its place, as `load_state_dict(assign=True)` and ``module.weight = …`` do. Then pass
        the new one. The sampler cannot see such a change, and goes on with the old tensor. The same
        holds after ``weight.data = new`` if it was given `weight.data`, another tensor than the
        Parameter. A sampler over a module sees all of these.

        With `screening` it also makes the 8-bit copy anew. A step raises if it knows of a change
        since: an assigned `.data`, or a change in place that torch counts. On a CPU it also
        compares a few rows, others in each step, and so sees changes through `.data` and of weights
        made under `torch.inference_mode`: at once if all rows changed. On a GPU it does not see
        these two. No step sees a change between replays of a captured graph, whose addresses stay:
        after an assigned `.data`, or a new tensor, capture again. The copy keeps its memory.

        Args:
            lm_head_weight, bias: the caller's new tensors, of the same shape, dtype, device and
                strides. Default: those the sampler has.

        Raises:
            TypeError, ValueError: a tensor is not like the one before, or the sampler was given a
                module, which has it.
        """
        with self.agreement.thread:
            self._caller.replace(lm_head_weight=lm_head_weight, bias=bias)
            self._caller.follow()
            self.local.refresh()
            self.ranks.counters.refreshes += 1
            self.agreement.refreshed()

    def reset(self) -> None:
        """Recover from a lost step, once every rank is back. Collective; no step may be running.

        Raises:
            PeerLost: a rank did not come within the timeout of the process group.
        """
        with self.agreement.thread:
            self.checks.ready()
            self.exchange.reset()
            self.agreement.reset()
            self._desync.last = None

    def close(self) -> None:
        """Release the exchange. Collective; every call that follows raises."""
        with self.agreement.thread:
            if not self.checks.closed:
                self.checks.closed = True
                self.ranks.close()
                self.exchange.close()

    def draw_seeds(self, batch: StepBatch) -> None:
        """Give the rows of a batch that wait for a seed theirs, as the next step would.

        Every rank calls at the same point, because all derive them in order from one random number.
        Nothing is sent. A replay of a captured graph draws none.
        """
        self.checks.ready()
        batch._draw_seeds(self.settings.seeds)

    def _forget_step(self) -> None:
        """Let go of the tensors of the last step; `compare` cannot look at it any more."""
        self._desync.last = None
