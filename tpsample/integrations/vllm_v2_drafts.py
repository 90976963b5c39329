"""Drafts of vLLM's runner V2: attributes of one runner are replaced, no module of vLLM is.

    runner.rejection_sampler            verifies drafts, by `tpsample.verify`
    runner.speculator.sample_draft      draws them, where vLLM is told to draw them

vLLM's drafter takes the most likely tokens by itself. Drafts that it draws
(`draft_sample_method`) would have noise of their own. Here each is drawn as the target's token
will be, by the same parameters and noise, so that more of them are accepted. For verification by
the ratio of the laws each is drawn in a stream of its own, and the drafter's logits are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsample.errors import UnsupportedParameter
from tpsample.integrations.vllm_v2 import V2Sampler
from tpsample.request.selection import Selection
from tpsample.speculative.drafting import Method, sample_draft


def attach(runner: Any, sampler: V2Sampler, method: Method = "coupled") -> None:
    """Let a runner with drafts verify them with tpsample.

    Args:
        method: of `tpsample.verify`.

    Raises:
        UnsupportedParameter: the drafter has the target's LogitsProcessor, which makes no logits.
    """
    drafter = runner.speculator
    if sampler.steps.head.is_of(getattr(drafter, "model", nn.Module())):
        raise UnsupportedParameter(
            "--speculative-config model: it makes its logits by the target's LogitsProcessor"
        )
    draws = None
    if drafter.draft_logits is not None:
        drafter.draft_logits = None  # of all ids
        drafter.sample_draft = draws = V2Drafter(sampler, drafter, method)
    runner.rejection_sampler = V2Verifier(sampler, method, draws)
    if method != "coupled":  # whether others have drafts decides no token of a request without
        sampler.verifier = runner.rejection_sampler


class V2Verifier:
    """Stands where vLLM's `RejectionSampler` stands.

    Args:
        method: "coupled", whose tokens are those of plain decoding, or "rejection" or "block".
        draws: has the laws of the drafts; None if the drafter takes its most likely tokens.
    """

    enable_adaptive_verification = False  # vLLM's warm-up reads it

    def __init__(self, sampler: V2Sampler, method: Method, draws: V2Drafter | None) -> None:
        self.sampler, self._method, self._draws = sampler, method, draws

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: None, invalid_drafts: Tensor | None
    ) -> Any:
        """Verify the drafts of each row; rows may have different numbers of them.

        Args:
            logits: the [rows, 0] that the head has handed on, a row for each position.
            invalid_drafts: bool [rows], the rows of drafts that no grammar has checked.
        """
        sampler, flat = self.sampler, self.sampler.steps.head.kept.consume(logits)
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
        index = starts.unsqueeze(1) + torch.arange(1, width, device=logits.device)
        drafts = given[index.clamp(max=len(given) - 1)].where(index < ends.unsqueeze(1), -1)
        at = input_batch.positions[input_batch.logits_indices[starts]] + 1
        # In a step that begins within the prompt vLLM puts stand-ins where drafts will be.
        lengths = sampler.req_states.prefill_len.gpu[input_batch.idx_mapping]
        drafts = drafts.masked_fill((at <= lengths).unsqueeze(1), -1)

        unfinished = sampler.unfinished(input_batch)
        rule: dict[str, Any] = {"method": self._method}
        if self._method != "coupled" and self._draws is not None and width > 1:
            rule["draft_logits"] = self._draws.laws[input_batch.idx_mapping, : width - 1]
        verified = sampler.steps.verify(flat, starts, drafts, rows, at, unfinished, **rule)
        tables = verified.tables
        if tables is not None:
            firsts = [width * row for row in range(count + 1)]
            tables = tables._replace(cu_num_generated_tokens=firsts)
        num_sampled = (verified.num_accepted + 1).to(torch.int32)
        return sampler.output(input_batch, verified.token_ids, num_sampled, tables, verified.kept)


class V2Drafter:
    """Stands where the `sample_draft` of a drafter stands.

    Attributes:
        laws: fp32 [slots + 1, K, V_local], the drafter's logits of the last drafts of each slot,
            and of padding. The method "coupled" looks at no law.
    """

    def __init__(self, sampler: V2Sampler, speculator: Any, method: Method) -> None:
        self._sampler, self._speculator, self._method = sampler, speculator, method
        self._on_shards = _is_sharded_alike(speculator.model, sampler.steps.head.kept.lm_head)
        if method != "coupled":
            size = len(sampler.taken) + 1, speculator.num_speculative_steps
            columns = len(sampler.steps.head.kept.sampler.shard)
            self.laws = torch.zeros(*size, columns, device=sampler.taken.device)
        self._selected: dict[int, Selection] = {}  # by the number of their rows

    def __call__(
        self,
        hidden_states: Tensor,
        sample_src_positions: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        draft_step: Tensor,
        *_: Any,
        spec_step_idx: int = 0,
    ) -> Tensor:
        """Return a draft per row, int64 [B]. Collective.

        Penalties do not see the drafts before it.

        Args:
            sample_src_positions: [B], of the tokens before the drafts.
            idx_mapping: [B], the slots of the rows; -1 for padding.
            temperature, seeds: not read, because the rows have their own.
            draft_step: how many drafts come before this one, of every row.
        """
        # A step that warms up names slots in which no request is.
        there = (idx_mapping >= 0) & self._sampler.taken[idx_mapping.clamp(min=0)]
        slots = idx_mapping.where(there, -1)
        rows = self._sampler.batch.select(slots, out=self._selected.get(len(slots)))
        self._selected[len(slots)] = rows
        sampler = self._sampler.steps.head.kept.sampler
        logits = self._local_logits(hidden_states, spec_step_idx)
        positions = sample_src_positions.to(torch.int64) + 1
        if self._method == "coupled":
            out = sampler.sample_logits(logits, rows, positions, head_applied=True)
            return out.token_ids.clamp(min=0)  # an id that can be embedded, for padding
        step = int(draft_step)
        self.laws[slots, step] = logits = logits.float()
        draft = sample_draft(sampler, logits, rows, positions, step, method=self._method)
        return draft.token_ids.clamp(min=0)

    def _local_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        """Return this rank's columns. Where the shards are others, vLLM gathers all of them."""
        shard = self._sampler.steps.head.kept.sampler.shard
        if self._on_shards:
            model = self._speculator.model
            local = model.logits_processor(model.lm_head, hidden_states, skip_gather=True)
            return local[:, : len(shard)].contiguous()
        every = self._speculator.compute_draft_logits(hidden_states, spec_step_idx)
        return every[:, shard.start : shard.stop].contiguous()


def _is_sharded_alike(model: Any, lm_head: Any) -> bool:
    """Whether each rank has the rows of a drafter's LM head that it has of the target's.

    A drafter of fewer ids, as of EAGLE-3, puts its logits in their places once they are gathered.
    """
    draft_head: Any = getattr(model, "lm_head", None)
    return (
        hasattr(model, "logits_processor")
        and getattr(model, "draft_id_to_target_id", None) is None
        and getattr(draft_head, "org_vocab_size", None) == lm_head.org_vocab_size
        and draft_head.num_embeddings_per_partition == lm_head.num_embeddings_per_partition
    )
