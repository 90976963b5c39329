"""vLLM's model runner V1 by tpsample: attributes of one runner are replaced, no module of vLLM is.

LogitsProcessor.forward of its model    keeps the hidden states (`vllm_head`)
runner.sampler                          samples them
runner.rejection_sampler                verifies drafts, by `tpsample.verify`
runner.sample_tokens                    keeps the grammar's bits, and which requests are new
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpsample.integrations.engine_rows import EngineRequest, EngineRows, StepRows
from tpsample.integrations.vllm_head import VllmHead
from tpsample.integrations.vllm_steps import EngineSteps

Kind = Callable[..., Any]


def attach(runner: Any, head: VllmHead, output: Kind, logprobs: Kind) -> None:
    """Let a runner sample with tpsample, and hand its tokens on in these classes of vLLM."""
    sampler = V1Sampler(runner, head, output, logprobs)
    runner.sampler = sampler
    if hasattr(runner, "rejection_sampler"):
        runner.rejection_sampler = V1Verifier(sampler)
    runner.sample_tokens = partial(sampler.sample_tokens, runner.sample_tokens)


class V1Sampler(nn.Module):
    """Stands where vLLM's `Sampler` stands.

    Attributes:
        new: the names of requests that are new since the last step; another may have had one.
    """

    def __init__(self, runner: Any, head: VllmHead, output: Kind, logprobs: Kind) -> None:
        super().__init__()
        self.new: set[str] = set()
        self.runner, self.output = runner, output
        self.logprobs_mode = runner.model_config.logprobs_mode
        self.steps = EngineSteps(head, self.logprobs_mode, logprobs)
        self._rows = EngineRows(self.steps.vocab_size, runner.max_num_reqs, self.steps.device)

    def forward(self, logits: Tensor, sampling_metadata: Any, **_: Any) -> Any:
        """Sample the runner's batch. The logits are the [rows, 0] of the head."""
        if self.is_dummy(sampling_metadata):
            ids = torch.zeros(len(logits), 1, dtype=torch.int32, device=logits.device)
            return self.output(sampled_token_ids=ids, logprobs_tensors=None)
        kept = self.steps.head.kept.consume(logits)
        rows = self.rows()
        count = len(rows.names)
        positions = self.runner.seq_lens[:count]
        token_ids, tables, _sets = self.steps.sample(kept, rows, positions, self.unfinished(count))
        return self.output(
            sampled_token_ids=token_ids.to(torch.int32).unsqueeze(1),
            logprobs_tensors=tables,
        )

    def is_dummy(self, sampling_metadata: Any) -> bool:
        """Whether this is no step of the runner's batch, but one that warms up."""
        return sampling_metadata is not self.runner.input_batch.sampling_metadata

    def rows(self) -> StepRows:
        """Return the rows of the runner's batch."""
        # vLLM rewinds them for rows in the middle of a prompt, which those of a CPU cannot.
        self.runner.input_batch.generators.clear()
        new, self.new = self.new, set()
        return self._rows.arrange(self.runner.input_batch.req_ids, self._load, new)

    def unfinished(self, rows: int) -> Tensor:
        """Return bool [B], the rows that are in the middle of their prompt."""
        mask: Tensor = self.runner.discard_request_mask.gpu[:rows]
        return mask.bool()

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Return the [rows, 0] of the head; `gather_logprobs` is called with it next."""
        return logits

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Return the logprobs of a prompt's tokens. Collective."""
        kept = self.steps.head.kept.consume(logprobs)
        return self.steps.prompt_tables(kept, token_ids, num_logprobs)

    def sample_tokens(self, own: Callable[[Any], Any], grammar_output: Any) -> Any:
        """Note which requests are new, then do what the runner's `own` does.

        The grammar's bits are kept from vLLM, who would write on logits.
        """
        state, self.steps.grammar = self.runner.execute_model_state, None
        if state is not None:
            self.new |= {new.req_id for new in state.scheduler_output.scheduled_new_reqs}
        if state is not None and grammar_output is not None:
            self.steps.keep_grammar(
                self.runner.input_batch.req_ids,
                grammar_output.structured_output_request_ids,
                grammar_output.grammar_bitmask,
                state.scheduler_output.scheduled_spec_decode_tokens,
            )
            grammar_output = None
        return own(grammar_output)

    def _load(self, name: Hashable) -> EngineRequest:
        """Return a request that joins, by the runner's name for it."""
        own = self.runner.requests[name]
        tokens = (own.prompt_token_ids or [], own.output_token_ids)
        return self.steps.request(name, own.sampling_params, lambda: tokens)


class V1Verifier(nn.Module):
    """Stands where vLLM's `RejectionSampler` stands; tokens are those of plain decoding."""

    def __init__(self, sampler: V1Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(
        self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        """Verify ragged drafts: row r has metadata.num_draft_tokens[r], and one position more."""
        sampler, steps = self.sampler, self.sampler.steps
        counts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
        width = metadata.max_spec_len + 1
        if sampler.is_dummy(sampling_metadata):
            ids = torch.zeros(len(counts), width, dtype=torch.int32, device=logits.device)
            return sampler.output(sampled_token_ids=ids, logprobs_tensors=None)
        flat = steps.head.kept.consume(logits)
        column = torch.arange(width - 1, device=logits.device)
        drafts = torch.full((len(counts), width - 1), -1, device=logits.device)
        drafts[column < counts.unsqueeze(1)] = metadata.draft_token_ids.to(torch.int64)
        starts = (counts + 1).cumsum(0) - (counts + 1)
        positions = sampler.runner.seq_lens[: len(counts)] - counts
        unfinished = sampler.unfinished(len(counts))
        verified = steps.verify(flat, starts, drafts, sampler.rows(), positions, unfinished)
        return sampler.output(
            sampled_token_ids=verified.token_ids.to(torch.int32),
            logprobs_tensors=verified.tables,
        )
