"""vLLM's model runner V2 by tpsample: attributes of one runner are replaced, no module of vLLM is.

    LogitsProcessor.forward of its model        keeps the hidden states (`vllm_head`)
    runner.sampler                              samples them; all else is its own sampler's
    runner.prompt_logprobs_worker               asks the head for logprobs of prompts
    structured_outputs_worker.apply_grammar_…   keeps the grammar's bits for the step

Requests live in slots, and a step names those of its rows, in any order and any subset. A row that
sits a step out leaves our batch, and joins again with its tokens.

The rows are arranged by name as with V1, and not selected by slot. The runner knows on the host
which requests a step has, so only their rows take the way that they need; `select` would have every
row take the way of whatever is in any slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsample.integrations.vllm_head import Head
from tpsample.integrations.vllm_prompt import PromptLogprobs
from tpsample.integrations.vllm_steps import EngineSteps


class Kinds(NamedTuple):
    """What a runner hands on, and its count of the rows that sampled."""

    output: Callable[..., Any]
    logprobs: Callable[..., Any]
    num_sampled: Callable[..., tuple[Tensor, Tensor]]


def attach(runner: Any, head: Head, kinds: Kinds) -> None:
    """Let a runner sample with tpsample."""
    sampler = V2Sampler(runner.sampler, runner.max_num_reqs, head, kinds)
    runner.sampler = sampler
    runner.prompt_logprobs_worker = PromptLogprobs(sampler.steps, kinds.logprobs)
    runner.structured_outputs_worker.apply_grammar_bitmask = sampler.keep_grammar


class V2Sampler:
    """Stands where vLLM's `Sampler` stands, whose states others read."""

    def __init__(self, own: Any, max_rows: int, head: Head, kinds: Kinds) -> None:
        self._own, self._kinds = own, kinds
        self.steps = EngineSteps(head, max_rows, own.logprobs_mode)
        self._requests: dict[int, tuple[int, Any]] = {}
        self._joined = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Let a request into a slot."""
        self._own.add_request(req_idx, sampling_params)
        self._joined += 1
        self._requests[req_idx] = (self._joined, sampling_params)

    def keep_grammar(
        self, logits: Tensor, input_batch: Any, grammar_req_ids: Sequence[str], bitmask: Any
    ) -> None:
        """Keep the bits of the requests with a grammar for the step that follows."""
        packed = torch.from_numpy(bitmask)
        rows = torch.full((input_batch.num_reqs, packed.shape[1]), -1, dtype=torch.int32)
        row_of = {name: row for row, name in enumerate(input_batch.req_ids)}
        for index, name in enumerate(grammar_req_ids):
            rows[row_of[name]] = packed[index]
        self.steps.grammar = self.steps.fitting(rows)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Sample the rows of a step. The logits are the [rows, 0] of the head."""
        kept = self.steps.head.take(logits)
        num_sampled, num_rejected = self._kinds.num_sampled(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        known = self.req_states.req_id_to_index
        if any(name not in known for name in input_batch.req_ids):  # a step that warms up
            ids = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
            return self._kinds.output(ids, None, None, num_sampled, num_rejected)
        # A request that was preempted comes back under its name; the number tells them apart.
        names = [(name, self._requests[known[name]][0]) for name in input_batch.req_ids]
        self.steps.batch(names, self._load)
        positions = input_batch.positions[input_batch.logits_indices] + 1
        sampled = self.steps.sample(kept, positions, num_sampled == 0)
        tables = sampled.logprobs
        return self._kinds.output(
            sampled.token_ids.view(-1, 1),
            None if tables is None else self._kinds.logprobs(*tables),
            None,
            num_sampled,
            num_rejected,
        )

    def _load(
        self, name: Hashable
    ) -> tuple[Any, Callable[[], tuple[Sequence[int], Sequence[int]]]]:
        assert isinstance(name, tuple)
        slot = self.req_states.req_id_to_index[name[0]]

        def tokens() -> tuple[list[int], list[int]]:
            states = self.req_states
            prompt, total = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
            ids = states.all_token_ids.gpu[slot, :total].tolist()
            return ids[:prompt], ids[prompt:]

        return self._requests[slot][1], tokens
