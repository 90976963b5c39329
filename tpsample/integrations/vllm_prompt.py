"""Logprobs of prompts for vLLM's model runner V2, chunk by chunk, without logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.integrations.vllm_steps import EngineSteps, Tables


class PromptLogprobs(Sealed):
    """Stands where vLLM's `PromptLogprobsWorker` stands."""

    def __init__(self, steps: EngineSteps, logprobs: Callable[..., Any]) -> None:
        self._steps, self._logprobs = steps, logprobs
        self._asked: dict[str, int] = {}
        self._found: dict[str, list[Tables]] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Remember how many of the most likely tokens a request asks for."""
        self.remove_request(req_id)
        if sampling_params.prompt_logprobs is not None:
            self._asked[req_id] = sampling_params.prompt_logprobs

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        self._asked.pop(req_id, None)
        self._found.pop(req_id, None)

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: Any,
    ) -> dict[str, Any]:
        """Return the logprobs of each prompt that is complete with this step. Collective.

        Args:
            logits_fn: the model's `compute_logits`, which returns the [rows, 0] of the head.
        """
        done: dict[str, Any] = {}
        for row, name in enumerate(input_batch.req_ids):
            slot = int(input_batch.idx_mapping_np[row])
            computed = int(input_batch.num_computed_prefill_tokens_np[row])
            prompt = int(prompt_lens[slot])
            # A request that comes back after it was preempted has reported its prompt before.
            resumed = prompt < int(input_batch.prefill_len_np[row])
            if name not in self._asked or computed >= prompt or resumed:
                continue
            start = int(input_batch.query_start_loc_np[row])
            count = int(input_batch.query_start_loc_np[row + 1]) - start
            complete = computed + count >= prompt
            count -= complete  # the last token predicts the first that is sampled
            if count:
                token_ids = all_token_ids[slot, computed + 1 : computed + 1 + count]
                kept = self._steps.head.take(logits_fn(hidden_states[start : start + count]))
                tables = self._steps.prompt_tables(kept, token_ids, self._asked[name])
                self._found.setdefault(name, []).append(tables)
            if complete and name in self._found:
                parts = zip(*self._found.pop(name), strict=True)
                done[name] = self._logprobs(*(torch.cat(part) for part in parts))
        return done

    def compute_prompt_token_id_logprobs(self, *_: Any) -> dict[str, Any]:
        """Return none: a request that asks for those of other ids is refused."""
        return {}
