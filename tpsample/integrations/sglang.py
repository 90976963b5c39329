"""SGLang with tpsample, by its official plug-ins: a sampling backend, and hooks around the LM head.

    python -m sglang.launch_server --sampling-backend tpsample --disable-cuda-graph …

SGLang calls `register` in each of its processes, because it is an entry point of the group
`sglang.srt.plugins`. Every field of a request is honoured, left to SGLang, or refused by name at
its door. Nothing changes in a server with another sampling backend: the hooks do something only in
a process in which the sampler of this file was built.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.errors import UnsupportedParameter
from tpsample.integrations import check_version
from tpsample.integrations.engine_rows import EngineRequest, EngineRows, StepRows
from tpsample.integrations.heads import HeadTap, is_quantised
from tpsample.integrations.self_test import WAY_OUT
from tpsample.output import KeptSets
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler

logger = logging.getLogger(__name__)

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "sampling_seed")
"""Fields that the sampler of a step reads."""

LEFT_TO_SGLANG = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs"),
    *("stop_str_max_len", "stop_regex_max_len", "is_normalized", "n", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
)
"""Fields that SGLang honours outside its sampler."""

REFUSED_OF_REQUEST = ("return_logprob", "custom_logit_processor")
"""Of a whole request. A server without LoRA refuses a `lora_path` by itself."""

_SRT = "sglang.srt."
_WHOLE = ("grammar_mask", "logit_bias", "acc_additive_penalties", "acc_scaling_penalties")
"""Tensors [rows, V] of SGLang's batches."""


class Hooks(Sealed):
    """The state that the hooks of one process share.

    Attributes:
        backends: the names under which the sampler is registered.
        backend_in_use: tells which one this server samples with.
        armed: whether the sampler was built, which alone understands what the head hands on.
        looked: whether this process was asked for a first step before it serves.
        head: keeps the hidden states of the last forward pass.
        processor: the `LogitsProcessor` that was given them.
        eos: the token that ends a request, for a row that has none.
        max_rows: most requests of a batch.
        requests: of the rows of this forward pass, in order. They stand for themselves, because a
            client may give the name of one that is done to the next. The references are weak,
            because rows that come no more would keep theirs.
    """

    def __init__(self) -> None:
        self.backends: set[str] = set()
        self.backend_in_use: Callable[[], str | None] = lambda: None
        self.armed = self.looked = False
        self.head = HeadTap()
        self.processor: Any = None
        self.eos = self.max_rows = 0
        self.requests: list[ref[Any]] = []
        self._rows: dict[bool, EngineRows] = {}  # by whether they report kept sets

    def hand_on(
        self,
        original: Any,
        processor: Any,
        hidden_states: Tensor,
        lm_head: Any,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Around `LogitsProcessor._get_logits`: keep its input, and return [rows, 0]."""
        if not self.armed:
            return original(processor, hidden_states, lm_head, *args, **named)
        bias = args[1] if len(args) > 1 else named.get("embedding_bias")
        self.processor = processor
        return self.head.capture(lm_head, bias, self.head.replace(hidden_states))

    def keep_off(
        self, original: Any, runner: Any, output: Any, info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `ModelRunner._preprocess_logits`, which adds [rows, V] to logits.

        Raises:
            RuntimeError: there is something to add, although all of it is refused at the door.
        """
        if not self.armed:
            return original(runner, output, info, *args, **kwargs)
        info.update_regex_vocab_mask()
        penalties = info.penalizer_orchestrator
        added = [name for name in _WHOLE if getattr(info, name) is not None]
        if penalties is not None and penalties.is_required:
            added.append("penalties")
        if added or info.has_custom_logit_processor:
            raise RuntimeError(f"SGLang would change logits, and there are none: {added}")
        self.eos = min(runner.model_config.hf_eos_token_id or [0])
        self.max_rows = runner.max_running_requests
        return None

    def admit(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """After `TokenizerManager._create_tokenized_object`: refuse what is not honoured.

        The request is as a scheduler will receive it, with the parameters that the server prefers.
        """
        if self.backend_in_use() in self.backends:
            check_request(request)
        return request

    def end_refused(
        self, original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `Scheduler._add_request_to_queue`: end what came through another door.

        SGLang's other front ends have no `TokenizerManager`. The client is told the reason.
        """
        if self.armed:
            try:
                check_request(request)
            except ValueError as error:
                params = type(request.sampling_params)(temperature=0.0, max_new_tokens=1)
                params.normalize(None)
                request.sampling_params, request.custom_logit_processor = params, None
                request.set_finish_with_abort(str(error))
        return original(scheduler, request, *args, **kwargs)

    def keep_backend(self, original: Any, view: Any) -> dict[str, Any]:
        """Around the choice of a sampler for `--enable-deterministic-inference`: ours stays.

        SGLang would put its own in the place of every other, and say so in one line. Our tokens are
        functions of hidden states, request, seed and position.
        """
        if view.sampling_backend not in self.backends:
            return dict(original(view))
        if view.enable_deterministic_inference:
            logger.info("tpsample samples in deterministic inference, too")
        return {}

    def look_first(self, original: Any, scheduler: Any) -> Any:
        """Around `Scheduler.get_init_info`, which tells that it is ready: compare a first step."""
        if self.armed and scheduler.is_generation:
            from tpsample.integrations.sglang_self_test import check_first_step

            self.looked = True
            check_first_step(scheduler, self.head)
        return original(scheduler)

    def keep_requests(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """After `ForwardBatch.init_new`: keep the requests of its rows."""
        if self.armed:
            batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "reqs"))
            self.requests = list(map(ref, batch.reqs))
        return forward_batch

    def rows(self, *, with_sets: bool, seeds: Tensor | None = None) -> StepRows:
        """Return the rows of this forward pass; those that were there before keep theirs.

        Args:
            seeds: int64 [B], SGLang's in deterministic inference, also of requests that name none.
        """
        requests = self.requests

        def load(request: Any) -> EngineRequest:
            seed = None if seeds is None else int(seeds[requests.index(request)])
            return EngineRequest(params_of(request(), seed), (), (), self.eos)

        return self._rows[with_sets].arrange(requests, load)

    def build(self, group: Any, max_rows: int, kept_cap: int) -> LMHeadSampler:
        """Make the sampler over the LM head of the last forward pass. Collective.

        Args:
            kept_cap: most ids of a sampling mask.

        Raises:
            RuntimeError: a request came before a first step was compared.
            UnsupportedParameter: (a ValueError) the LM head is quantised.
        """
        if not self.looked:
            raise RuntimeError(
                "self-test: SGLang has another start than the one that was tried, and none was "
                f"made; {WAY_OUT}"
            )
        lm_head = self.head.lm_head
        if is_quantised(lm_head):
            raise UnsupportedParameter("model: a quantised LM head is not supported with SGLang")
        self.head.build(
            "SGLang",
            logger,
            lm_head.weight,
            vocab_size=lm_head.org_vocab_size,
            group=group,
            bias=self.head.bias,
            logit_scale=self.processor.logit_scale or 1.0,
            logit_softcap=self.processor.final_logit_softcapping or None,
            max_rows=max_rows,
            on_failed=self.eos,
        )
        sampler = self.head.sampler
        size = sampler.vocab_size, max_rows, sampler.weight.device
        self._rows = {False: EngineRows(*size), True: EngineRows(*size, kept_cap)}
        return sampler


def params_of(request: Any, seed: int | None = None) -> SamplingParams:
    """Return our request for one of SGLang's, which says greedy as top_k = 1.

    Args:
        seed: in the place of the request's own.
    """
    params = request.sampling_params
    return SamplingParams(
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed_of_request(request) if seed is None else seed,
        filter_order="min_p_last",
    )


def check_request(request: Any) -> None:
    """Raise for what a request asks for and is not honoured, before it is let in.

    An exception in a step would end the server with everybody's requests.

    Args:
        request: of SGLang, as its front end hands it on, or its scheduler has it.

    Raises:
        ValueError: naming the field; a value that SGLang takes and we cannot, or that ends SGLang.
    """
    for name in REFUSED_OF_REQUEST:
        if getattr(request, name, None):
            raise UnsupportedParameter(f"{name}: not supported with tpsample")
    params = request.sampling_params
    unset = type(params)()
    for name in params.__struct_fields__:
        if name in SAMPLED or name in LEFT_TO_SGLANG:
            continue
        if getattr(params, name) != getattr(unset, name):
            raise UnsupportedParameter(f"{name}: not supported with tpsample")
    try:
        params_of(request)
    except TypeError as error:  # which SGLang's server would answer with status 500
        raise UnsupportedParameter(str(error)) from error
    if params.top_k >= 2**31:
        raise UnsupportedParameter(f"top_k: expected at most 2^31 - 1, got {params.top_k}")


def seed_of_request(request: Any) -> int:
    """Return the seed of a request in its batch; one that names none has that of its own name.

    SGLang's names are random, and the same on every rank.
    """
    seed = request.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    digest = hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def masks_of(
    kept: KeptSets, token_ids: Tensor, rows: Tensor, support: Tensor | None, width: int
) -> tuple[Tensor | None, ...]:
    """Return the fields of SGLang's `SamplingMaskOutput` for the rows that ask, [N].

    They are ids int32 [N, width], how many there are, and the log-probability of the token among
    them. Log-probabilities of all these ids follow for the rows `support` of the N. The last is a
    status: 0 with a set, 1 if the set is larger than the cap or of all ids, 2 if the row has no
    token.
    """
    starts, counts = kept.offsets[rows], kept.offsets.diff()[rows]
    offset = torch.arange(width, device=rows.device)
    there = offset < counts.unsqueeze(1)
    index = torch.where(there, starts.unsqueeze(1) + offset, len(kept.token_ids))
    ids = F.pad(kept.token_ids, (0, 1))[index]
    logprobs = F.pad(kept.log_masses, (0, 1)).float()[index].masked_fill(~there, -torch.inf)
    drawn = there & (ids == token_ids[rows].unsqueeze(1))
    selected = logprobs.where(drawn, -torch.inf).amax(dim=1)
    none = torch.where(kept.sizes[rows] > 0, 1, 2).to(torch.int32)
    of_all = None if support is None else logprobs.index_select(0, support)
    statuses = none.masked_fill(counts > 0, 0)
    return ids.to(torch.int32), counts.to(torch.int32), selected, of_all, statuses


def check_modes(arguments: Any) -> None:
    """Raise an UnsupportedParameter for arguments of a server with which it would be wrong."""
    graphs = not arguments.disable_cuda_graph and arguments.device != "cpu"
    modes = {
        "--speculative-algorithm": arguments.speculative_algorithm is not None,
        "--enable-dp-attention": bool(arguments.enable_dp_attention),
        "--enable-lora": bool(arguments.enable_lora),
        "--enable-watermark": bool(arguments.enable_watermark),
        "--dllm-algorithm": arguments.dllm_algorithm is not None,
        "--pp-size": arguments.pp_size > 1,
        "CUDA graphs (pass --disable-cuda-graph)": graphs,
        "overlapped scheduling (pass --disable-overlap-schedule)": (
            not arguments.disable_overlap_schedule
        ),
    }
    refused = [name for name, wrong in modes.items() if wrong]
    if refused:
        raise UnsupportedParameter(f"SGLang with tpsample does not run with {', '.join(refused)}")


def register(backend: str = "tpsample") -> None:
    """Register the sampling backend and the hooks; SGLang calls this in each of its processes."""
    import sglang

    check_version("sglang", sglang.__version__)
    from sglang.srt.layers.logits_processor import SamplingMaskOutput
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_exec, get_server_args

    first = not _HOOKS.backends
    _HOOKS.backends.add(backend)
    _HOOKS.backend_in_use = lambda: get_exec().kernel.sampling_backend

    class TpSampler(Sampler):  # type: ignore[misc]
        """Stands where SGLang's `Sampler` stands."""

        def __init__(self) -> None:
            super().__init__()
            check_modes(get_server_args())
            self._sampler: LMHeadSampler | None = None
            _HOOKS.armed = True

        def forward(
            self, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **_: Any
        ) -> Tensor:
            positions: Tensor = args[2]
            hidden_states = _HOOKS.head.consume(logits_output.next_token_logits)
            if self._sampler is None:
                cap = self.sampling_mask_max_tokens
                self._sampler = _HOOKS.build(self.tp_sync_group, _HOOKS.max_rows, cap)
            _HOOKS.head.rebind_weight()
            asking = sampling_info.sampling_mask_batch_indices
            seeds = sampling_info.sampling_seed
            batch = _HOOKS.rows(with_sets=asking is not None, seeds=seeds).batch
            out = self._sampler(hidden_states.contiguous(), batch, positions.to(torch.int64) + 1)
            if asking is not None and out.kept is not None:
                support = sampling_info.sampling_support_logprobs_capture_indices
                width = min(self.sampling_mask_max_tokens, self._sampler.vocab_size)
                masks = masks_of(out.kept, out.token_ids, asking, support, width)
                logits_output.sampling_mask_output = SamplingMaskOutput(*masks)
            return out.token_ids

    register_sampler_backend(backend, TpSampler)
    if not first:
        return
    for target, hook in (
        ("layers.logits_processor.LogitsProcessor._get_logits", _HOOKS.hand_on),
        ("model_executor.model_runner.ModelRunner._preprocess_logits", _HOOKS.keep_off),
        ("managers.scheduler.Scheduler._add_request_to_queue", _HOOKS.end_refused),
        ("managers.scheduler.Scheduler.get_init_info", _HOOKS.look_first),
        ("arg_groups.overrides._deterministic_sampling_backend", _HOOKS.keep_backend),
    ):
        HookRegistry.register(_SRT + target, hook, HookType.AROUND)
    for target, after in (
        ("managers.tokenizer_manager.TokenizerManager._create_tokenized_object", _HOOKS.admit),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", _HOOKS.keep_requests),
    ):
        HookRegistry.register(_SRT + target, after, HookType.AFTER)


_HOOKS = Hooks()
