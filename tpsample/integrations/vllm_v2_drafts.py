"""Drafts of vLLM's runner V2: attributes of one runner are replaced, no module of vLLM is.

    runner.rejection_sampler            verifies drafts, by `tpsample.verify`

vLLM's drafter proposes them by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsample.errors import UnsupportedParameter
from tpsample.integrations.vllm_v2 import V2Sampler


def attach(runner: Any, sampler: V2Sampler) -> None:
    """Let a runner with drafts verify them with tpsample.

    Raises:
        UnsupportedParameter: the drafter's logits are those of the target, of which there are none.
    """
    drafter = runner.speculator
    if sampler.steps.head.is_of(getattr(drafter, "model", nn.Module())):
        raise UnsupportedParameter(
            "--speculative-config model: it makes its logits by the target's LogitsProcessor"
        )
    runner.rejection_sampler = V2Verifier(sampler)


class V2Verifier:
    """Stands where vLLM's `RejectionSampler` stands; tokens are those of plain decoding."""

    enable_adaptive_verification = False  # vLLM's warm-up reads it

    def __init__(self, sampler: V2Sampler) -> None:
        self.sampler = sampler

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: None, invalid_drafts: Tensor | None
    ) -> Any:
        """Verify ragged drafts. The logits are the [rows, 0] of the head, a row per position.

        Args:
            invalid_drafts: bool [rows], those of drafts that their grammar has not looked at.
        """
        sampler, flat = self.sampler, self.sampler.steps.head.kept.take(logits)
        rows, count = sampler.rows(input_batch), input_batch.num_reqs
        width = int(np.diff(input_batch.cu_num_logits_np).max())
        if rows is None:
            ids = torch.zeros(count, width, dtype=torch.int64, device=logits.device)
            return sampler.output(input_batch, ids, input_batch.seq_lens.new_ones(count))
        # The first position of a row was given its last token, and the others its drafts.
        given = input_batch.input_ids[input_batch.logits_indices].to(torch.int64)
        if invalid_drafts is not None:
            given = given.masked_fill(invalid_drafts, -1)
        starts, ends = input_batch.cu_num_logits[:-1], input_batch.cu_num_logits[1:]
        place = starts.unsqueeze(1) + torch.arange(1, width, device=logits.device)
        drafts = given[place.clamp(max=len(given) - 1)].where(place < ends.unsqueeze(1), -1)
        at = input_batch.positions[input_batch.logits_indices[starts]] + 1
        # In a step that begins within the prompt vLLM puts stand-ins where drafts will be.
        lengths = sampler.req_states.prefill_len.gpu[input_batch.idx_mapping]
        drafts = drafts.masked_fill((at <= lengths).unsqueeze(1), -1)

        unfinished = sampler.unfinished(input_batch)
        found = sampler.steps.verify(flat, starts, drafts, rows, at, unfinished)
        tables = found.tables
        if tables is not None:
            firsts = [width * row for row in range(count + 1)]
            tables = tables._replace(cu_num_generated_tokens=firsts)
        num_sampled = (found.num_accepted + 1).to(torch.int32)
        return sampler.output(input_batch, found.token_ids, num_sampled, tables, found.kept)
