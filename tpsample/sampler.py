"""LMHeadSampler: hidden states → local candidates → exchange → token, on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample import compiled
from tpsample.agreement import agree
from tpsample.checks import (
    check_num_samples,
    check_out,
    check_prompt,
    check_step,
    positions_tensor,
)
from tpsample.desync import DesyncDetector
from tpsample.errors import Desync, PeerLost
from tpsample.exchange import make_exchange
from tpsample.exchange.base import Exchange
from tpsample.exchange.ranks import Ranks
from tpsample.output import Logprobs, SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.seeds import SeedSource
from tpsample.score import Head
from tpsample.step_agreement import Checked, CheckedCall, StepAgreement
from tpsample.step_buffer import capturing
from tpsample.stored.plan import finish_stored_rows
from tpsample.stored.prompt_logprobs import find_prompt_logprobs
from tpsample.stored.rows import StoredRows
from tpsample.torch_backend import TorchBackend
from tpsample.vocab_shard import VocabShard

if TYPE_CHECKING:
    from tpsample.triton_backend import TritonBackend

C = TypeVar("C", Checked, CheckedCall)


class LMHeadSampler:
    """Samples next tokens from hidden states and this rank's rows of the LM head.

        logit = softcap · tanh(logit_scale · (hidden_states · weight^T) / softcap) + bias
        token = argmax over the vocabulary of fma(logit, log2 e / T, -L(seed, position, id))

    which is a draw from softmax(logit / T) (Gumbel-max; fused into the LM head by FlashSampling,
    arXiv 2603.15854). Logits are never stored or gathered: each rank keeps its best candidate
    per row, the ranks exchange 8 bytes per row, and all return the same token. The token depends
    on nothing but the row: not on ranks, shards, tiles, other rows or exchange. Of rows with
    top_k, top_p, min_p or logprobs each rank stores its own part of the logits, and the ranks
    exchange some integers more (`tpsample.stored.filters`, `tpsample.stored.logprobs`).

    Building it is collective over `group`: ranks compare their arguments, and if one is wrong or
    they disagree every rank raises the same error.

    Args:
        lm_head_weight: [V_local, D] bf16, fp16 or fp32, last axis contiguous: the rows of this
            rank's shard first; further rows are padding and never seen. D and dtype must match
            across ranks. Kept by reference.
        vocab_size: V, at most 2^20; must match. Default: where the shards end, or the sum of the
            ranks' weight rows.
        shard: global ids of this rank's rows; the ranks' shards tile [0, V). Default:
            `VocabShard.even` of `vocab_size`, or the weight rows in rank order.
        group: torch process group; None is the default group, or one rank if
            torch.distributed is not initialised.
        bias: [V_local], added to the logits after the soft-cap.
        logit_scale, logit_softcap: see the formula; must match.
        max_rows: most rows × samples of a step; sizes the buffers; must match.
        exchange: "collective", "p2p", "peer" (the kernel writes to the other GPUs), "two_level"
            (inside each host, then between hosts) or "auto": "peer" if NVLink connects all pairs
            and its memory can be set up, else "collective"; must match.
        chunks: parts of the vocabulary whose words travel while the next part is computed, 1 to
            64; must match.
        philox_rounds: 10, or 7 (faster, the fewest that pass BigCrush); must match.
        backend: "triton" (a GPU, or the interpreter if TRITON_INTERPRET=1), "torch" (plain
            PyTorch, tile by tile) or "auto"; must match.
        desync_every: `compare` the ranks by themselves after this many steps, which waits for the
            GPU once in as many; 0 is off; must match.

    Raises:
        TypeError, ValueError: a wrong argument, on one rank.
        RankMismatch: (a ValueError) a wrong argument on some of several ranks, on every rank.
        PeerLost: a rank did not come within the timeout of the process group.
    """

    def __init__(
        self,
        lm_head_weight: Tensor,
        *,
        vocab_size: int | None = None,
        shard: VocabShard | None = None,
        group: dist.ProcessGroup | Ranks | None = None,
        bias: Tensor | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        max_rows: int = 256,
        exchange: str = "auto",
        chunks: int = 1,
        philox_rounds: int = 10,
        backend: str = "auto",
        desync_every: int = 0,
    ) -> None:
        agreed = agree(
            group,
            weight=lm_head_weight,
            vocab_size=vocab_size,
            shard=shard,
            bias=bias,
            head=Head(logit_scale, logit_softcap),
            max_rows=max_rows,
            exchange=exchange,
            chunks=chunks,
            philox_rounds=philox_rounds,
            backend=backend,
            desync_every=desync_every,
        )
        self.vocab_size, self.shard, self.backend = agreed.vocab_size, agreed.shard, agreed.backend
        self.max_rows, self.weight = max_rows, lm_head_weight
        self.philox_rounds = philox_rounds
        device = lm_head_weight.device
        self.seeds = SeedSource(agreed.seed_root)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.exchange = make_exchange(
            agreed.exchange,
            agreed.ranks,
            max_rows,
            chunks,
            device,
            hosts=agreed.hosts,
            fall_back=exchange == "auto",
        )
        self._bias, self._head, self._rounds = bias, agreed.arguments.head, philox_rounds
        self._local = self._make_backend(self.exchange)
        self._prompt: TorchBackend | TritonBackend | None = None
        self._agreement = StepAgreement(agreed.ranks, self.exchange)
        if desync_every:
            self.exchange.integers.require_group("desync_every")
        self._desync = DesyncDetector(desync_every, self.exchange.integers, device)
        self._handle = compiled.register(self)
        # What captured graphs read at replay; a batch whose rows change makes new tensors of some.
        self._captured: list[object] = []

    def _make_backend(self, exchange: Exchange) -> TorchBackend | TritonBackend:
        part = (self.weight, self.shard, self._bias, self._head)
        if self.backend == "torch":
            return TorchBackend(*part, rounds=self._rounds, chunks=exchange.chunks)
        from tpsample.triton_backend import TritonBackend  # needs Triton

        return TritonBackend(*part, rounds=self._rounds, exchange=exchange)

    def __call__(
        self,
        hidden_states: Tensor,
        batch: SamplingBatch,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> SampleOutput:
        """Sample one token per row (or `num_samples` independent ones).

        Collective: every rank calls with the same hidden states, batch and positions. May be
        called inside torch.compile (`tpsample.compiled`).

        Args:
            hidden_states: [B, D], dtype and device of lm_head_weight.
            batch: B rows, or one request for all rows.
            positions: int64 [B], or one int: absolute position of the token being generated. With
                the seed it names the row's noise, so it must differ from step to step.
            num_samples: draws per row; draw 0 is the one made without it.
            out: output to write into, from an earlier call with the same shape; default a new one.

        Returns:
            Tokens and status, the same on every rank.

        Raises:
            TypeError, ValueError: before anything is sent.
            UnsupportedParameter: (a ValueError) filters or logprobs between ranks without a
                process group.
            RankMismatch: (a ValueError) with several ranks, in place of these, the same on every
                rank: here on CPUs, by `check` on GPUs and with `peer` (`tpsample.step_agreement`).
            Desync: with `desync_every`, on every rank, after this step.
            PeerLost: on CPUs, a rank did not answer within the timeout of the process group. On
                GPUs and with `peer` the status says so, and `check` names the rank.
        """
        if torch.compiler.is_compiling():
            return compiled.call(self._handle, hidden_states, batch, positions, num_samples, out)
        return self.finish(
            self.start(hidden_states, batch, positions, num_samples=num_samples, out=out)
        )

    def start(
        self,
        hidden_states: Tensor,
        batch: SamplingBatch,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> SampleOutput:
        """First half of a call: all of it but waiting for the other ranks.

        Every start is followed by its `finish`. Several ranks in one process need the halves
        apart; see `VirtualWorld`.
        """
        checked = self.settled(
            lambda: self._checked(hidden_states, batch, positions, num_samples, out)
        )
        batch, positions, samples = checked.batch, checked.positions, checked.num_samples
        rows = batch.rows
        with self._left_on_error():
            if batch.unseeded:
                batch.draw_seeds(self.seeds)
            if out is None:
                out = SampleOutput.empty(batch.seed, num_samples)
            out.seeds, out.logprobs, out.kept = batch.seed, None, None
            self._batch, self._step_positions = batch, positions
            if capturing(self.weight.device):
                self._captured.append((vars(batch).copy(), positions))
            if rows == 0:
                return out

            self._local.begin(hidden_states, batch, positions, samples)
            words = rows * samples
            for part in range(self.exchange.parts):
                self._local.run(part, self.exchange.own_words(part)[:words])
                self.exchange.publish(part, words)
        return out

    def _checked(
        self,
        hidden_states: Tensor,
        batch: SamplingBatch,
        positions: Tensor | int,
        num_samples: int | None,
        out: SampleOutput | None,
    ) -> Checked:
        """What the step will work on."""
        samples = check_num_samples(num_samples)
        check_step(
            hidden_states,
            batch,
            samples,
            weight=self.weight,
            vocab_size=self.vocab_size,
            max_rows=self.max_rows,
        )
        rows = hidden_states.shape[0]
        if out is not None:
            check_out(out, rows, num_samples, self.weight.device)
        batch = batch.for_rows(rows)
        if batch.stored is not None:
            self.exchange.integers.require_group()
        positions = positions_tensor(positions, rows, self.weight.device, self._positions)
        return Checked(batch, positions, samples)

    def settled(self, check: Callable[[], C]) -> C:
        """What `check` returns, if it raises on no rank and all return the like.

        Collective where ranks meet on the host; see `tpsample.step_agreement`.
        """
        checked, error = None, None
        try:
            checked = check()
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        self._agreement.settle(checked, error)
        assert checked is not None
        return checked

    @contextmanager
    def _left_on_error(self) -> Iterator[None]:
        """A rank that cannot go on tells its peers why; they are waiting for it."""
        try:
            yield
        except (PeerLost, Desync):
            raise
        except Exception as error:
            self._agreement.leave(f"{type(error).__name__}: {error}", refused=False)
            raise

    def finish(self, out: SampleOutput) -> SampleOutput:
        """Second half of a call: fills in what `start` returned, and returns it."""
        if out.status.shape[0] > 0:
            with self._left_on_error():
                self.exchange.finish(out, self._local.decode)
                if self._batch.stored is not None:
                    rows = self._local.stored_rows()
                    finish_stored_rows(rows, self._batch, self.exchange.integers, out)
                self._desync.add(self._step_positions, out)
        return out

    def forget_step(self) -> None:
        """Let go of the tensors of the last step; `compare` cannot look at it any more."""
        self._local.forget()
        self._desync.forget_step()
        for name in ("_batch", "_step_positions"):
            vars(self).pop(name, None)

    def prompt_logprobs(
        self, hidden_states: Tensor, token_ids: Tensor, *, top: int = 0
    ) -> Logprobs:
        """Raw logprobs of the tokens of a prompt: log-softmax of the logits at every position.

        Collective: every rank calls with the same arguments. Nothing is sampled. A rank holds the
        logits of `max_rows` positions at a time, over its own shard.

        Args:
            hidden_states: [L, D], dtype and device of lm_head_weight.
            token_ids: int64 [L], the token that came after each position.
            top: how many of the most likely tokens to report as well.

        Returns:
            `Logprobs` [L, 1 + top], the same bits on every rank and for any number of ranks: the
            token that came, then the most likely ones. A position with a NaN logit, or without an
            unmasked token, has ids -1, values NaN and ranks 0.

        Raises:
            ValueError: before anything is sent.
            UnsupportedParameter: (a ValueError) several ranks without a process group.
        """
        self.settled(lambda: self._checked_prompt(hidden_states, token_ids, top))
        if self._prompt is None:
            alone = Exchange(Ranks(), self.max_rows, 1, self.weight.device)
            self._prompt = self._make_backend(alone)
        return find_prompt_logprobs(
            self._prompt,
            hidden_states,
            token_ids,
            top,
            vocab_size=self.vocab_size,
            chunk=self.max_rows,
            integers=self.exchange.integers,
        )

    def _checked_prompt(self, hidden_states: Tensor, token_ids: Tensor, top: int) -> CheckedCall:
        check_prompt(hidden_states, token_ids, top, weight=self.weight, vocab_size=self.vocab_size)
        self.exchange.integers.require_group("prompt_logprobs")
        return CheckedCall("prompt_logprobs", token_ids, top)

    def local_logits(
        self, hidden_states: Tensor, batch: SamplingBatch, positions: Tensor | int
    ) -> tuple[StoredRows, Tensor]:
        """This rank's logits of `batch.stored`, and the status of every row; draws nothing.

        Collective, as a call. The logits are overwritten by the next step.
        """
        out = self.start(hidden_states, batch, positions)
        self.exchange.finish(out, self._local.decode)
        return self._local.stored_rows(), out.status

    def check(self) -> None:
        """Raise if a rank failed to answer in an earlier step. Waits for the GPU.

        Raises:
            PeerLost: naming the ranks that did not.
            RankMismatch: a rank refused its step; the error it raised.
        """
        self.exchange.check()

    def compare(self) -> None:
        """Whether all ranks sampled the same since they last compared; see `tpsample.desync`.

        Collective. Without `desync_every` the last step alone is looked at. Waits for the GPU.

        Raises:
            Desync: naming the ranks that differ from most.
            UnsupportedParameter: several ranks without a process group.
        """
        self.exchange.integers.require_group("compare, desync_every")
        self._desync.compare()

    def reset(self) -> None:
        """Recover from a lost step, once every rank is back. Collective; no step may be running.

        Raises:
            PeerLost: a rank did not come within the timeout of the process group.
        """
        self.exchange.reset()
        self._agreement.reset()
        self._desync.reset()

    def close(self) -> None:
        """Release the exchange. Collective."""
        self.exchange.close()
