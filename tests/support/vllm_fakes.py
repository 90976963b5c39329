"""Fakes of vLLM's model, runners and requests, with the attributes that the adapter reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tpsample import VocabShard
from tpsample.integrations.vllm_head import VllmHead

V, D, PADDED = 131, 16, 160
EOS = 7


class UnquantizedEmbeddingMethod:
    """Known by its name."""


class Int8Method:
    """A product of another kind."""


ASKS_FOR_NOTHING: dict[str, Any] = {
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("top_k", "min_tokens"), 0),
    "stop_token_ids": [],
    "all_stop_token_ids": {EOS},
    "eos_token_id": EOS,
    **dict.fromkeys(
        (
            *("seed", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "logprobs"),
            *("logprob_token_ids", "prompt_logprobs", "thinking_token_budget", "watermarking"),
            *("trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        )
    ),
}

_PROPERTIES = ("all_stop_token_ids", "eos_token_id", "bad_words_token_ids")
"""Attributes whose fields are called by the same name with an underscore."""


class Request(SimpleNamespace):
    """`vllm.SamplingParams`, as the front end completes it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**(ASKS_FOR_NOTHING | given))

    @property
    def __struct_fields__(self) -> tuple[str, ...]:
        return tuple(f"_{name}" if name in _PROPERTIES else name for name in vars(self))

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None and self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs


class Processor(nn.Module):
    """vLLM's `LogitsProcessor`: it scales behind the soft-cap."""

    def __init__(self, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.scale, self.soft_cap, self.org_vocab_size = scale, soft_cap, V
        self.logits_as_input, self.head_dtype = False, None

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather=False):
        assert skip_gather, "logits would be gathered"
        logits = hidden_states @ lm_head.weight.T
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale


class Model(nn.Module):
    """One whose logits, if they were made, would be `processor.forward`."""

    def __init__(self, weight: Tensor, shard: VocabShard, processor: Processor, method: Any):
        super().__init__()
        self.processor = processor
        own = torch.full((PADDED, D), torch.nan)
        own[: len(shard)] = weight[shard.start : shard.stop]
        self.lm_head = SimpleNamespace(
            weight=nn.Parameter(own, requires_grad=False),
            quant_method=method,
            num_embeddings_per_partition=PADDED,
            org_vocab_size=V,
            shard_indices=SimpleNamespace(
                org_vocab_start_index=shard.start, org_vocab_end_index=shard.stop
            ),
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.processor.forward(self.lm_head, hidden_states)


def whole_weight() -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(3))


def runner(
    *,
    method: Any = None,
    processor: Processor | None = None,
    shard: VocabShard | None = None,
    **config: Any,
) -> Any:
    """Return the attributes that both runners have."""
    shard = VocabShard(0, V) if shard is None else shard
    processor = Processor() if processor is None else processor
    model = Model(whole_weight(), shard, processor, method or UnquantizedEmbeddingMethod())
    vllm_config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=None,
        lora_config=None,
        watermark_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(
            enable_batch_sharded_sampling=None, prefill_context_parallel_size=1
        ),
    )
    model_config = SimpleNamespace(
        get_hidden_size=lambda: D,
        logprobs_mode=config.pop("logprobs_mode", "raw_logprobs"),
        logits_processors=None,
        return_sampling_mask=config.pop("return_sampling_mask", False),
        enable_trace_replay=False,
        enable_prompt_embeds=False,
    )
    return SimpleNamespace(
        model=model,
        model_config=model_config,
        vllm_config=vllm_config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_num_reqs=6,
        is_pooling_model=False,
        broadcast_pp_output=False,
        **config,
    )


def head_of(each: Any, *, group: Any = "alone", depth: int = 1, fused: bool = True) -> VllmHead:
    return VllmHead(each.model.processor, each, group=group, depth=depth, fused=fused)


class Output(NamedTuple):
    sampled_token_ids: Tensor
    logprobs_tensors: Any
    num_nans: Any = None
    num_sampled: Any = None
    num_rejected: Any = None
    sampling_mask_tensors: Any = None


class SamplingMaskLists(NamedTuple):
    token_ids: Any
    offsets: Any
    cu_num_generated_tokens: Any


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: Any = None

    @staticmethod
    def cat(parts: list[LogprobsTensors]) -> LogprobsTensors:
        return LogprobsTensors(*(torch.cat(part) for part in list(zip(*parts, strict=True))[:3]))


@dataclass
class V1State:
    """A request of runner V1."""

    sampling_params: Request
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)


def v1_runner(**config: Any) -> Any:
    """Runner V1, without requests."""
    each = runner(**config)
    each.requests = {}
    each.input_batch = SimpleNamespace(
        req_ids=[], generators={0: object()}, sampling_metadata=object()
    )
    each.seq_lens = torch.zeros(each.max_num_reqs, dtype=torch.int32)
    each.discard_request_mask = SimpleNamespace(
        gpu=torch.zeros(each.max_num_reqs, dtype=torch.bool)
    )
    each.execute_model_state = None
    each.sample_tokens = lambda grammar_output: grammar_output
    return each


def v1_batch(each: Any, names: Sequence[str], unfinished: Sequence[str] = ()) -> None:
    """Let these requests, in this order, be the batch of the next step."""
    each.input_batch.req_ids = list(names)
    each.input_batch.sampling_metadata = object()
    for row, name in enumerate(names):
        state = each.requests[name]
        each.seq_lens[row] = len(state.prompt_token_ids) + len(state.output_token_ids)
        each.discard_request_mask.gpu[row] = name in unfinished


class _Slots:
    """A tensor of runner V2, by both of its names."""

    def __init__(self, tensor: Tensor) -> None:
        self.gpu, self.np = tensor, tensor.numpy()


class _OwnSampler:
    """The states of vLLM's sampler."""

    def __init__(self, rows: int, asked: Any) -> None:
        self.logprobs_mode = asked.logprobs_mode
        self.return_sampling_mask = asked.return_sampling_mask
        self.added: list[int] = []
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            prompt_len=_Slots(torch.zeros(rows, dtype=torch.int32)),
            prefill_len=_Slots(torch.zeros(rows, dtype=torch.int32)),
            total_len=_Slots(torch.zeros(rows, dtype=torch.int32)),
            all_token_ids=_Slots(torch.zeros(rows, 64, dtype=torch.int32)),
        )

    def add_request(self, req_idx: int, sampling_params: Request) -> None:
        self.added.append(req_idx)


def v2_runner(**config: Any) -> Any:
    """Runner V2, without requests."""
    each = runner(**config)
    each.sampler = _OwnSampler(each.max_num_reqs, each.model_config)
    each.prompt_logprobs_worker = None
    each.speculator = SimpleNamespace(draft_logits=None)  # one of n-grams
    each.structured_outputs_worker = SimpleNamespace(apply_grammar_bitmask=None)
    return each


def v2_request(each: Any, name: str, slot: int, request: Request, prompt: Sequence[int]) -> None:
    """Let a request into a slot."""
    states = each.sampler.req_states
    states.req_id_to_index[name] = slot
    for lengths in (states.prompt_len, states.prefill_len, states.total_len):
        lengths.gpu[slot] = len(prompt)
    states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)
    each.sampler.add_request(slot, request)
    if each.prompt_logprobs_worker is not None:
        each.prompt_logprobs_worker.add_request(name, slot, request)


def v2_append(each: Any, slot: int, token_id: int) -> None:
    """Let a slot have another token, as the runner does behind a step."""
    states = each.sampler.req_states
    states.all_token_ids.gpu[slot, int(states.total_len.gpu[slot])] = token_id
    states.total_len.gpu[slot] += 1


def v2_batch(
    each: Any,
    names: Sequence[str],
    lengths: Sequence[int] | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
) -> Any:
    """The batch of a step of these requests; `lengths` are those of all tokens before its drafts.

    Of each row the batch has its last token and its drafts.
    """
    states = each.sampler.req_states
    slots = [states.req_id_to_index.get(name, 0) for name in names]
    if lengths is None:
        lengths = [int(states.total_len.gpu[slot]) for slot in slots]
    of_row = [[]] * len(names) if drafts is None else drafts
    counts = np.array([len(its) for its in of_row])
    starts = np.concatenate([[0], np.cumsum(counts + 1)])
    firsts = np.repeat(np.array(lengths) - 1 - starts[:-1], counts + 1)
    return SimpleNamespace(
        req_ids=list(names),
        num_reqs=len(names),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        seq_lens=torch.tensor(np.array(lengths) + counts, dtype=torch.int32),
        cu_num_logits=torch.tensor(starts, dtype=torch.int32),
        cu_num_logits_np=starts,
        num_draft_tokens_per_req=None if drafts is None else counts,
        input_ids=torch.tensor([i for its in of_row for i in (0, *its)], dtype=torch.int32),
        positions=torch.tensor(firsts + np.arange(starts[-1])),
        logits_indices=torch.arange(int(starts[-1])),
        expanded_idx_mapping=torch.tensor(np.repeat(slots, counts + 1)),
        expanded_local_pos=torch.tensor(np.concatenate([np.arange(n + 1) for n in counts])),
        seq_lens_cpu_upper_bound=torch.tensor(np.array(lengths) + counts),
    )


def count_sampled(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    """vLLM's `get_num_sampled_and_rejected`."""
    done = (seq_lens >= prefill_len[idx_mapping]).to(num_sampled.dtype)
    return done * num_sampled, done * (cu_num_logits.diff() - num_sampled)
