"""LMHeadSampler: hidden states → local words → exchange → token, on one page."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpsample import compiled
from tpsample.agreement.arguments import BackendName, ExchangeName, ScreeningName
from tpsample.agreement.construction import agree, refuse_to_build
from tpsample.agreement.misplaced import collective, refuse_on_sampler
from tpsample.agreement.step_checks import check_batch
from tpsample.backends.over_zeros import list_over_zeros, verify_over_zeros
from tpsample.backends.triton_.tile_table import tile_ends
from tpsample.core.checks import check_tensor
from tpsample.core.handles import handle_of
from tpsample.core.sealed import Sealed
from tpsample.core.tensors import ordinary_tensors, outside_of_graphs
from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.errors import PeerLost
from tpsample.filters.finish import prompt_logprobs
from tpsample.output import Logprobs, SampleOutput
from tpsample.pipeline import Pipeline
from tpsample.ranks.ranks import Ranks
from tpsample.request.kinds import KINDS, Kind, batches_of
from tpsample.request.plan import BatchView
from tpsample.request.row_filter import FEW_LOGPROBS
from tpsample.request.step import Inputs
from tpsample.request.step_batch import StepBatch


class LMHeadSampler(Sealed):
    """Samples next tokens from hidden states and this rank's rows of the LM head.

        logit = softcap · tanh(logit_scale · (hidden_states · weight^T) / softcap) + bias
        token = argmax over the vocabulary of fma(logit, log2 e / T, -L(seed, position, id))

    This is a draw from softmax(logit / T) by the Gumbel-max trick, which FlashSampling (arXiv
    2603.15854) fused into the LM head. No rank stores or gathers the logits: each keeps its best
    candidate per row, the ranks exchange 8 bytes per row, and all return the same token. For given
    hidden states it depends on nothing but its row: not on the number of ranks, shards, tiles,
    other rows or the exchange. Of rows with top_k, top_p, min_p or logprobs each rank stores its
    own part of the logits, and the ranks exchange some integers more (`tpsample.filters`). Logits
    that the caller computed, a shard's columns per rank, are sampled by `sample_logits`.

    Building a sampler is collective over `group`, because the ranks compare their arguments: if
    one is wrong, or they disagree, every rank raises the same error. Several ranks on CPUs
    also compile their kernels there, once per machine, because no later call has time for it.

    Args:
        lm_head_weight: [V_local, D] bf16, fp16 or fp32, last axis contiguous. It is read where it
            is and may change between steps (`refresh`). The rows of this rank's shard come first;
            rows after them are padding and never read. D and dtype must match across ranks. A
            tensor [V_local, 0] is a head without a weight: the sampler then takes logits
            (`sample_logits`) and no hidden states. A DTensor [V, D] with Shard(0) on one axis of
            its mesh brings its rows: `shard`, `group` and `vocab_size` follow from it. A module
            brings its `weight` and `bias`, which are looked up in each step: the next step reads
            whatever takes their place, as `load_state_dict(assign=True)` and `tie_weights` do it.
            Its forward and its hooks are not called; see `sample_logits` for one that needs them.
        vocab_size: V, at most 2^20; must match. Default: where the shards or weight rows end.
        shard: global ids of this rank's rows; the ranks' shards tile [0, V). For a vocabulary that
            is padded before it is split, as in vLLM and Megatron, see `VocabShard.padded`. Default:
            the weight rows in rank order, or `VocabShard.even` with padding behind the rows of each
            rank. With `vocab_size` one of the two must fit, or both must be the same shards.
        group: torch process group, or "alone" for a rank that samples by itself inside a larger
            job. Default: the default group, or one rank if torch.distributed is not initialised and
            no launcher says that there are several processes.
        bias: [V_local], added to the logits after the soft-cap.
        logit_scale, logit_softcap: see the formula; above 0; must match.
        max_rows: most rows × samples of a step; sizes the buffers; must match.
        exchange: "collective", "p2p", "peer" (the kernel writes to the other GPUs), "two_level"
            (inside each host, then between hosts) or "auto"; must match. "auto" is "peer" if
            NVLink connects all pairs and its memory can be set up, else "collective". On CPUs
            "collective" and "p2p" are the same: one message to every peer.
        chunks: 1 to 64 parts of the vocabulary, each sent while the next one is computed; must
            match. On CPUs only "peer" splits the vocabulary.
        backend: "triton" (a GPU, or the interpreter if TRITON_INTERPRET=1), "numba" (a CPU where
            Numba is installed, the extra `cpu`; threads: `torch.get_num_threads()`), "torch" (the
            definition in plain PyTorch, slow) or "auto"; must match. On a CPU "numba" and "torch"
            both compute the exact dot product, rounded once to fp32.
        screening: None, or "int8": a step first reads an 8-bit copy of the weights. Then it reads
            the weights of the few tokens that a bound cannot rule out, and draws the same tokens
            (`backends.screening`). On a GPU steps of up to 64 rows × samples do so, if no row has
            filters or logprobs. On a CPU rows without them do; a CPU that lacks AVX512_VNNI reads
            the copy for one or two rows alone. The copy takes D + 12 bytes per row of the shard; on
            a GPU D is rounded up to 128, and 17 bytes more are working memory. It does not follow
            weights that change: see `refresh`. It may differ between ranks.
        on_failed: the token of a row whose status is not OK. Engines in which -1 means something
            else may name another id, such as that of the end of a text. Must match. Default: -1, no
            token.

    At the end of a `with` statement the sampler is closed.

    Attributes:
        weight, vocab_size, shard, backend, max_rows, on_failed: fixed, see `refresh`

    Raises:
        TypeError, ValueError: an argument is wrong, on one rank.
        RankMismatch: (a ValueError) an argument is wrong on some of several ranks.
        PeerLost: a rank did not come within the timeout of the process group.
    """

    _FIXED: ClassVar[Mapping[str, str]] = {
        "weight": "pass another weight to refresh(lm_head_weight)",
        "bias": "pass another to refresh(bias=…), or build a new sampler",
        **dict.fromkeys(
            (
                *("settings", "ranks", "vocab_size", "shard", "group", "exchange", "chunks"),
                *("backend", "screening", "max_rows", "on_failed", "logit_scale", "logit_softcap"),
            ),
            "build a new sampler",
        ),
    }

    @ordinary_tensors
    @collective(refuse_to_build)
    def __init__(
        self,
        lm_head_weight: Tensor | nn.Module,
        *,
        vocab_size: int | None = None,
        shard: VocabShard | None = None,
        group: dist.ProcessGroup | Ranks | Literal["alone"] | None = None,
        bias: Tensor | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        max_rows: int = 256,
        exchange: ExchangeName = "auto",
        chunks: int = 1,
        backend: BackendName = "auto",
        screening: ScreeningName | None = None,
        on_failed: int = -1,
    ) -> None:
        self._options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "shard": shard,
            "group": group,
            "logit_scale": logit_scale,
            "logit_softcap": logit_softcap,
            "max_rows": max_rows,
            "exchange": exchange,
            "chunks": chunks,
            "backend": backend,
            "screening": screening,
            "on_failed": on_failed,
        }
        given = {"lm_head_weight": lm_head_weight, "bias": bias}
        with agree(weight=lm_head_weight, bias=bias, **self._options) as settings:
            pipeline = self.pipeline = Pipeline(settings, given)
        self.settings, self.ranks = settings, settings.ranks
        self.weight, self.vocab_size = settings.weight, settings.vocab_size
        self.shard, self.backend = settings.shard, settings.backend
        self.max_rows, self.on_failed = settings.max_rows, settings.on_failed
        self.exchange, self.local = pipeline.exchange, pipeline.local
        self.checks, self.agreement = pipeline.checks, pipeline.agreement
        self.handle = handle_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LMHeadSampler:
        """Return a new sampler over copies of the weight and the bias, on a rank alone."""
        if self.ranks.world_size > 1:
            raise TypeError(
                "LMHeadSampler: is not copied, because several ranks build one together; build "
                "another over the copied weight on every rank"
            )
        given = copy.deepcopy(self.pipeline.caller.given(), memo)
        copied = LMHeadSampler(**given, **self._options)
        copied.pipeline.caller.warns = False
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "LMHeadSampler: is neither pickled nor copied by copy.copy, because it has connections "
            "and compiled kernels; save the weight, and build a sampler where it is loaded"
        )

    if not TYPE_CHECKING:  # a type checker knows the attributes, and tells of others

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that says what a sampler is."""
            way_out = "it is no module, and follows the weight that it was given"
            if name in ("forward", "sample", "generate"):
                way_out = "call it as sampler(hidden_states, batch, positions)"
            elif name in self._FIXED:
                way_out = "what it was built with is in sampler.settings"
            raise AttributeError(f"{type(self).__name__} has no {name}; {way_out}")

    def __enter__(self) -> LMHeadSampler:
        self.checks.ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.checks.closed else ""
        return (
            f"LMHeadSampler(vocab_size={self.vocab_size}, ids {self.shard.start} to "
            f"{self.shard.stop} on rank {self.ranks.rank} of {self.ranks.world_size}, "
            f"exchange={self.exchange.name!r}, backend={self.backend!r}, "
            f"max_rows={self.max_rows}{state})"
        )

    @collective(refuse_on_sampler)
    def __call__(
        self,
        hidden_states: Tensor,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
    ) -> SampleOutput:
        """Sample one token per row, or `num_samples` independent ones.

        Collective: every rank calls with the same hidden states, batch and positions. The call may
        stand inside torch.compile; rows with seeds do not break its graph (`.compiled`).

        Args:
            hidden_states: [B, D], dtype and device of lm_head_weight.
            batch: B rows, or B slots (`SamplingBatch.select`).
            positions: int64 [B], or one int: absolute position of the token being generated, which
                is the number of tokens before it. Seed and position decide the row's noise, so it
                must differ from step to step. On a CPU one warning per batch tells of rows that
                draw again at a position. On a GPU nothing checks it.
            num_samples: draws per row; draw 0 is the draw without num_samples. Texts that continue
                from different draws need different seeds, see `SamplingParams.fork`.
            out: output to write into, from an earlier call with the same shape; default a new one.

        Returns:
            Tokens and status, the same on every rank.

        Raises:
            TypeError, ValueError: a wrong or unknown argument, before anything is sent.
            RankMismatch: (a ValueError) with several ranks, in place of these, the same on every
                rank: here on CPUs, by `check` on GPUs and with `peer` (`tpsample.agreement.step`).
            PeerLost: on CPUs, a rank did not answer within the timeout of the process group. On
                GPUs and with `peer` the status says so, and `check` names the rank.
        """
        if torch.compiler.is_compiling():
            return compiled.call(self, hidden_states, batch, positions, num_samples, out)
        with self.agreement:  # both halves, for one thread
            inputs = Inputs(hidden_states)
            started = self.pipeline.start(inputs, batch, positions, num_samples, out)
            return self.pipeline.finish(started)

    @outside_of_graphs
    @collective(refuse_on_sampler)
    def sample_logits(
        self,
        local_logits: Tensor,
        batch: StepBatch | BatchView,
        positions: Tensor | int,
        *,
        num_samples: int | None = None,
        out: SampleOutput | None = None,
        head_applied: bool = False,
    ) -> SampleOutput:
        """Sample one token per row from this rank's logits, which nobody gathers.

        Collective. It keeps every promise of a call with hidden states: equal logits have equal
        tokens, bit for bit. The sampler applies controls, filters, noise and the exchange. The
        caller has applied scale, soft-cap and bias, because the logits are taken as they are.
        Probabilities are refused in the first calls on a CPU.

        Args:
            local_logits: fp32, bf16 or fp16 [B, V_local], the columns of this rank's shard, last
                axis contiguous. They are converted to fp32, which is exact. There may be as many
                columns as lm_head_weight has rows; those after the shard are never read.
            batch, positions, num_samples, out: as in a call with hidden states.
            head_applied: True confirms that the logits include `logit_scale`, `logit_softcap` and
                `bias`. It is required if the sampler was built with one of them.

        The result and the errors are those of a call with hidden states.
        """
        with self.agreement:  # both halves, for one thread
            inputs = Inputs(local_logits, are_logits=True, head_applied=head_applied)
            started = self.pipeline.start(inputs, batch, positions, num_samples, out)
            return self.pipeline.finish(started)

    @outside_of_graphs
    @collective(refuse_on_sampler)
    def prompt_logprobs(
        self, hidden_states: Tensor, next_token_ids: Tensor, *, top: int = 0
    ) -> Logprobs:
        """Return raw logprobs of a prompt's tokens: log-softmax of the logits at every position.

        Collective: every rank calls with the same arguments. Nothing is sampled. A rank holds the
        logits of `max_rows` positions at a time, over its own shard.

        Args:
            hidden_states: [L, D], dtype and device of lm_head_weight.
            next_token_ids: int64 [L], the token that came after each position. For hidden states of
                all positions but the last it is the prompt from its second token on.
            top: how many of the most likely tokens to report as well.

        Returns:
            `Logprobs` [L, 1 + top], the same bits for any number of ranks: the token that came,
            then the most likely ones. A position with a NaN logit, or without an unmasked token,
            has ids -1, values NaN and ranks 0.

        Raises:
            ValueError: an argument is wrong; raised before anything is sent.
        """
        with self.agreement:
            arguments = hidden_states, next_token_ids, top
            call = self.agreement.check_on_all_ranks(self.checks.prompt, *arguments)
            rows, top = hidden_states.detach(), call.num_samples
            return prompt_logprobs(self.local, rows, next_token_ids, top, self.settings)

    @collective(refuse_on_sampler)
    def warm_up(
        self,
        kinds: Sequence[Kind] = tuple(KINDS),
        *,
        rows: Sequence[int] = (),
        num_samples: int | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Compile, load and launch what later steps with requests of these kinds need.

        A step that comes first with its mix of controls compiles for seconds, and inside a graph
        capture that is an error. After a warm-up of all kinds nothing is compiled in any mix, over
        rows or slots. Hidden states have to be contiguous and begin at multiples of 16 bytes. With
        all kinds and an empty cache of Triton it takes minutes on a GPU; a warm one seconds.

        Collective: every rank calls with the same arguments. Each step is a real one over zeros.
        Its tokens are dropped. `counters` count the step, but not its failed rows. The steps are
        from hidden states, or from fp32 logits if the sampler has no weight.

        Args:
            kinds: names of `tpsample.request.kinds.KINDS`. There are steps of each kind alone, of
                all together, and of each set of kinds that a kernel tells apart.
            rows: how many rows the steps have. Default: on a GPU the fewest and the most of each
                batch tile up to `max_rows`, because each tile is a kernel; on a CPU 1.
            num_samples: as in the later steps; any number above 1 stands for all of them. Steps
                without num_samples are warmed up as well.
            num_drafts: the most drafts per row of a later `verify`; any number from 1 to 31 stands
                for all of these. Default: no verification.

        Raises:
            ValueError: no such kind; RankMismatch (a ValueError) on every rank if only some raise.
            RuntimeError: on GPUs, a kernel needs more shared memory than there is.
        """
        with self.agreement:
            self.agreement.check_on_all_ranks(
                self.checks.warm_up, kinds, rows, num_samples, num_drafts
            )
        self.local.compile_ahead()
        device, compiled = self.weight.device, self.backend == "triton"
        with self.ranks.counters.no_failed_rows():
            for draws in dict.fromkeys((None, num_samples)):
                most, drafts = self.max_rows // (draws or 1), 0 if draws else num_drafts
                how: dict[str, Any] = {"most": most, "num_drafts": drafts, "compiled": compiled}
                for num_rows in rows or (tile_ends(most) if device.type == "cuda" else [1]):
                    for batch in batches_of(kinds, num_rows, self.vocab_size, device, **how):
                        self._step_over_zeros(batch, draws)
                    if "logprobs" in kinds and self.weight.shape[1]:
                        self._prompt_over_zeros(num_rows)
            of_shard = self.shard, self.vocab_size
            if "top_p" in kinds and compiled:
                list_over_zeros(*of_shard, self.ranks.world_size, device)
            if num_drafts and compiled:
                verify_over_zeros(*of_shard, num_drafts, device)
        self.agreement.compare_next_states()

    def _prompt_over_zeros(self, num_rows: int) -> None:
        zeros = self.weight.new_zeros(num_rows, self.weight.shape[1])
        next_ids = torch.zeros(num_rows, dtype=torch.int64, device=self.weight.device)
        for top in (1, min(FEW_LOGPROBS + 1, self.vocab_size)):
            self.prompt_logprobs(zeros, next_ids, top=top)

    def _step_over_zeros(self, batch: StepBatch | BatchView, num_samples: int | None) -> None:
        if self.weight.shape[1]:
            hidden_states = self.weight.new_zeros(batch.rows, self.weight.shape[1])
            self(hidden_states, batch, 0, num_samples=num_samples)
        else:
            logits = self.weight.new_zeros(batch.rows, len(self.shard), dtype=torch.float32)
            self.sample_logits(logits, batch, 0, num_samples=num_samples, head_applied=True)
        if isinstance(batch, StepBatch):  # tokens that count as none
            batch.append(batch.seed.new_full((batch.rows, 1), NO_TOKEN))

    def counters(self) -> dict[str, Any]:
        """Return what this rank has counted since the sampler was built, for an engine's metrics.

        Nothing is sent, and the device is not waited for.

        Returns:
            steps: steps and verifications that ended, those of `warm_up` among them.
            rows: their rows.
            tokens: the draws: rows × samples of steps that began, rows × (K + 1) of verifications.
            failed_rows: rows whose status was not OK. On a CPU every step counts its own; on a GPU
                `count_failed` does, for a status that was read.
            second_rounds: filtered rows for which the ranks searched the last kept token. They did
                so to decide the token, or for kept sets or processed logprobs. With `fixed_rounds`
                and in captured graphs only the device knows, so nothing is counted.
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

        Raises:
            ValueError: another tensor.
        """
        device = getattr(status, "device", self.weight.device)
        check_tensor("status", status, (torch.int32,), "B", device, ", of an output of a call")
        self.pipeline.count_failed(status)

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

    @collective(refuse_on_sampler)
    def compare(self, hidden_states: Tensor | None = None) -> None:
        """Raise if the ranks sampled differently in the last step.

        Collective; waits for the GPU. See `tpsample.agreement.desync`.

        Args:
            hidden_states: [B, D] of this rank, which must be the same on every rank, bit for bit.
                From others all ranks draw the same wrong tokens.

        Raises:
            Desync: ranks differ; it names those that differ from most.
            RankMismatch: another rank made another call, where ranks meet on the host.
        """
        with self.agreement:
            self.agreement.check_on_all_ranks(self.checks.compare, hidden_states)
            self.pipeline.desync.compare(hidden_states, self.settings.device)

    @collective(refuse_on_sampler)
    def refresh(self, lm_head_weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Take the weight as it is now. Call it on every rank after a change; it is always right.

        It waits for no other rank, unless it is refused: the next call of the others is, too.

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
            RuntimeError: the sampler was closed, or its GPU is not the current one.
            RankMismatch: (a ValueError) with several ranks, in place of these, the same on every
                rank.
        """
        with self.agreement:
            try:
                self.checks.ready()
                self.pipeline.caller.replace(lm_head_weight=lm_head_weight, bias=bias)
                self.pipeline.caller.rebind_aliases()
                self.local.refresh()
            except Exception as error:  # of whatever kind: the other ranks must hear of it
                self.agreement.tell(error)
            self.ranks.counters.refreshes += 1
            self.agreement.refreshed()

    @collective(lambda given, error: given["self"].agreement.refuse_reset(error))
    def reset(self) -> None:
        """Recover from a lost step, once every rank is back. Collective; no step may be running.

        Raises:
            RankMismatch: on a rank another thread is in a call, the sampler is closed, or an
                argument was given; every rank raises it, and none has recovered.
            PeerLost: a rank did not come. The wait is twice the timeout of the process group and
                3 s, for a rank whose step began when another came here. After a loss it is longer
                by the time since then and one timeout, by at most 120 s. So do not ask by a reset
                whether a rank lives.
        """
        with self.agreement.in_reset(self.checks.ready):
            self.exchange.reset()
            self.agreement.reset()
            self.pipeline.desync.last = None

    def close(self) -> None:
        """Release the exchange. Collective; every later call raises.

        A forked process only marks its own copy as closed, and tells no other rank.
        """
        if self.ranks.inherited:
            self.checks.closed = True
            return
        with self.agreement.thread:
            if not self.checks.closed:
                self.checks.closed = True
                self.ranks.close()
                self.exchange.close()

    @collective(refuse_on_sampler)
    def draw_seeds(self, batch: StepBatch) -> None:
        """Give a seed to each row of a batch that waits for one, as the next step would.

        Every rank calls at the same point, because all derive seeds in order from one random
        number. It waits for no other rank, unless it is refused: the next call of the others is,
        too. A replay of a captured graph draws no seeds.

        Raises:
            TypeError, ValueError: the batch does not fit the sampler.
            RuntimeError: the sampler was closed, or another thread is in it or in the batch.
            RankMismatch: (a ValueError) with several ranks, in place of these, the same on every
                rank.
        """
        with self.agreement:
            try:
                self.checks.ready()
                check_batch(batch, self.settings)
                batch._draw_seeds(self.settings.seeds)
            except Exception as error:  # of whatever kind: the other ranks must hear of it
                self.agreement.tell(error)
