"""vLLM's model runner V2 by tpsample: attributes of one runner are replaced, no module of vLLM is.

    LogitsProcessor.forward of its model        keeps the hidden states (`vllm_head`)
    runner.sampler                              samples them; all else is its own sampler's
    runner.prompt_logprobs_worker               asks the head for logprobs of prompts
    structured_outputs_worker.apply_grammar_…   keeps the grammar's bits for the step

A request keeps its slot for life, in the runner and in our batch. A step names its rows by the
runner's tensor of slots, in any order and any subset, and the host does not read it. So a row that
sits a step out keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsample.core.sealed import Sealed
from tpsample.integrations.engine_rows import EngineRequest, StepRows
from tpsample.integrations.vllm_head import VllmHead
from tpsample.integrations.vllm_steps import EngineSteps
from tpsample.integrations.vllm_v2_processors import V2Processors
from tpsample.output import KeptSets
from tpsample.request.batch import SamplingBatch
from tpsample.request.selection import Selection


class Kinds(NamedTuple):
    """The classes of vLLM that a step hands its results on in.

    Attributes:
        output: its `SamplerOutput`.
        logprobs: its `LogprobsTensors`.
        masks: its `SamplingMaskLists`.
        count_sampled: its `get_num_sampled_and_rejected`.
    """

    output: Callable[..., Any]
    logprobs: Callable[..., Any]
    masks: Callable[..., Any]
    count_sampled: Callable[..., tuple[Tensor, Tensor]]


def attach(runner: Any, head: VllmHead, kinds: Kinds) -> V2Sampler:
    """Let a runner sample with tpsample, and hand its tokens on in these classes of vLLM.

    Drafts are another file's, `vllm_v2_drafts`.
    """
    steps = EngineSteps(head, runner.sampler.logprobs_mode, kinds.logprobs)
    sampler = V2Sampler(runner.sampler, runner.max_num_reqs, steps, kinds)
    runner.sampler = sampler
    runner.prompt_logprobs_worker = PromptLogprobs(steps)
    runner.structured_outputs_worker.apply_grammar_bitmask = sampler.keep_grammar
    return sampler


class V2Sampler:
    """Stands where vLLM's `Sampler` stands, whose states others read.

    Attributes:
        batch: a row per slot of the runner.
        taken: bool, of every slot, whether a request is in it.
        processors: the server's own; None if there are none.
        verifier: takes a step without drafts, too, where the noise of a verification is another's.
    """

    processors: V2Processors | None = None
    verifier: Callable[[Tensor, Any, None, None], Any] | None = None

    def __init__(self, own: Any, max_rows: int, steps: EngineSteps, kinds: Kinds) -> None:
        self._own, self._kinds, self.steps = own, kinds, steps
        self.batch = SamplingBatch.of_slots(
            max_rows,
            vocab_size=steps.vocab_size,
            device=steps.device,
            kept_cap=steps.vocab_size if own.return_sampling_mask else None,
        )
        self._selected: dict[int, Selection] = {}  # by the number of their rows
        self._joining: dict[int, Any] = {}
        self._requests: dict[int, EngineRequest] = {}
        self._slots = StepRows.of(self.batch, (), [])
        self.taken = torch.zeros(max_rows, dtype=torch.bool, device=steps.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Let a request into a slot."""
        self._own.add_request(req_idx, sampling_params)
        self._joining[req_idx] = sampling_params

    def keep_grammar(
        self, logits: Tensor, input_batch: Any, grammar_req_ids: Sequence[str], bitmask: Any
    ) -> None:
        """Keep the bits of the requests with a grammar for the step that follows."""
        drafts: dict[str, range] = {}
        if input_batch.num_draft_tokens_per_req is not None:
            counts = input_batch.num_draft_tokens_per_req.tolist()
            drafts = dict(zip(input_batch.req_ids, map(range, counts), strict=True))
        self.steps.keep_grammar(input_batch.req_ids, grammar_req_ids, bitmask, drafts)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Sample the rows of a step. The logits are the [rows, 0] of the head."""
        if self.verifier is not None and not self.steps.head.kept.compared:
            return self.verifier(logits, input_batch, None, None)
        kept, rows = self.steps.head.kept.consume(logits), self.rows(input_batch)
        one = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        if rows is None:
            return self.output(input_batch, torch.zeros_like(one, dtype=torch.int64), one)
        positions = input_batch.positions[input_batch.logits_indices] + 1
        unfinished = self.unfinished(input_batch)
        process = None
        if self.processors is not None and not self.steps.head.kept.compared:
            process = partial(self.processors.apply, input_batch=input_batch)
        token_ids, tables, sets = self.steps.sample(kept, rows, positions, unfinished, process)
        return self.output(input_batch, token_ids, one, tables, sets)

    def rows(self, input_batch: Any) -> StepRows | None:
        """Return the rows of a step; None for a step that warms up."""
        known = self.req_states.req_id_to_index
        if not known.keys() >= set(input_batch.req_ids):
            return None
        if self._joining:
            self._join({known[name]: name for name in known})
        slots = input_batch.idx_mapping
        selected = self.batch.select(
            slots, host=input_batch.idx_mapping_np, out=self._selected.get(len(slots))
        )
        self._selected[len(slots)] = selected
        return StepRows(selected, input_batch.req_ids, self._slots.ids[slots])

    def unfinished(self, input_batch: Any) -> Tensor:
        """Return bool [B], the rows that are in the middle of their prompt."""
        lengths = self.req_states.prefill_len.gpu[input_batch.idx_mapping]
        in_prompt: Tensor = input_batch.seq_lens[: input_batch.num_reqs] < lengths
        return in_prompt

    def output(
        self,
        input_batch: Any,
        token_ids: Tensor,
        num_sampled: Tensor,
        tables: Any = None,
        sets: KeptSets | None = None,
    ) -> Any:
        """Hand tokens [B] or [B, K + 1] on; unfinished rows have none.

        Args:
            num_sampled: int32 [B], how many a row would have, were it finished.
        """
        counts = self._kinds.count_sampled(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        masks = None if sets is None else SamplingMasks(sets, self._kinds.masks)
        token_ids = token_ids.view(input_batch.num_reqs, -1)
        return self._kinds.output(token_ids, tables, None, *counts, masks)

    def _join(self, names: Mapping[int, str]) -> None:
        """Put requests that joined into their slots, now that the runner has staged their tokens.

        Requests that left are freed here too: another joins in most steps that one leaves.
        """
        self.batch.free([slot for slot in self._requests if slot not in names])
        there = {slot: request for slot, request in self._requests.items() if slot in names}
        joined = {
            slot: self.steps.request(names[slot], own, partial(self._tokens, slot))
            for slot, own in self._joining.items()
            if slot in names
        }
        self._joining.clear()
        if joined:
            params, prompts, outputs, _ = zip(*joined.values(), strict=True)
            self.batch.put(list(joined), params, prompt_token_ids=prompts, output_token_ids=outputs)
        self._requests = there | joined
        requests = [self._requests.get(slot) for slot in range(self.batch.rows)]
        self._slots = StepRows.of(self.batch, (), requests)
        taken = torch.tensor([request is not None for request in requests], device="cpu")
        self.taken.copy_(taken, non_blocking=True)

    def _tokens(self, slot: int) -> tuple[list[int], list[int]]:
        """Return prompt and output of a slot, which the runner keeps on the device."""
        states = self.req_states
        prompt, total = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
        ids = states.all_token_ids.gpu[slot, :total].tolist()
        return ids[:prompt], ids[prompt:]


class SamplingMasks(Sealed):
    """Stands where vLLM's `SamplingMaskTensors` stands: the ids that each row could have drawn."""

    def __init__(self, kept: KeptSets, kind: Callable[..., Any]) -> None:
        self._kept, self._kind = kept, kind

    def to_cpu_nonblocking(self) -> SamplingMasks:
        """Return them on the host, once the stream is done."""
        names = [field.name for field in fields(self._kept)]
        on_host = {name: getattr(self._kept, name).to("cpu", non_blocking=True) for name in names}
        return SamplingMasks(KeptSets(**on_host), self._kind)

    def tolists(self, num_sampled_tokens: Any) -> Any:
        """Return the ids of each token, ascending, one token after the other.

        Args:
            num_sampled_tokens: int [B] or [B, 1]; a row whose prompt goes on has 0.
        """
        kept, sampled = self._kept, np.asarray(num_sampled_tokens).reshape(-1)
        whole, counts = kept.whole.numpy(), kept.offsets.diff().numpy()
        ids, sizes = kept.token_ids[: int(kept.offsets[-1])].numpy(), kept.sizes.numpy()
        row = np.repeat(np.arange(len(counts)), counts)
        parts = np.split(ids[np.lexsort((ids, row))].astype(np.int32), np.cumsum(counts)[:-1])
        for index in np.flatnonzero(whole):
            parts[index] = np.arange(sizes[index], dtype=np.int32)
        there = np.arange(len(counts) // len(sampled)) < sampled[:, None]
        parts = [parts[index] for index in np.flatnonzero(there)]
        offsets = np.cumsum([0, *map(len, parts)])
        firsts = np.cumsum([0, *sampled]).tolist()
        return self._kind(np.concatenate([np.empty(0, np.int32), *parts]), offsets, firsts)


class PromptLogprobs(Sealed):
    """Stands where vLLM's `PromptLogprobsWorker` stands; a prompt comes chunk by chunk."""

    def __init__(self, steps: EngineSteps) -> None:
        self._steps = steps
        self._num_logprobs: dict[str, int] = {}
        self._tables: dict[str, list[Any]] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Remember how many of the most likely tokens a request asks for."""
        self.remove_request(req_id)
        if sampling_params.prompt_logprobs is not None:
            self._num_logprobs[req_id] = sampling_params.prompt_logprobs

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        self._num_logprobs.pop(req_id, None)
        self._tables.pop(req_id, None)

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
            if name not in self._num_logprobs or computed >= prompt or resumed:
                continue
            start = int(input_batch.query_start_loc_np[row])
            count = int(input_batch.query_start_loc_np[row + 1]) - start
            complete = computed + count >= prompt
            count -= complete  # the last token predicts the first that is sampled
            if count:
                token_ids = all_token_ids[slot, computed + 1 : computed + 1 + count]
                kept = self._steps.head.kept.consume(
                    logits_fn(hidden_states[start : start + count])
                )
                tables = self._steps.prompt_tables(kept, token_ids, self._num_logprobs[name])
                self._tables.setdefault(name, []).append(tables)
            if complete and name in self._tables:
                done[name] = self._steps.kind.cat(self._tables.pop(name))
        return done

    def compute_prompt_token_id_logprobs(self, *_: Any) -> dict[str, Any]:
        """Return none: a request that asks for those of other ids is refused."""
        return {}
