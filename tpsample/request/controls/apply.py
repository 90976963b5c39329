"""The controls of the rows of one step: their slots, the ids they may draw, and their logits.

Twins: `triton_.kernels.token_mask` and `triton_.kernels.controls`. The mask of a row is

    allowed_token_ids ∧ grammar bitmask; then without stop ids while the output is shorter than
    min_tokens, unless stop ids are all that is left; and without the last id of every bad word
    whose other ids are the latest output; a forced token stands alone

Whether only stop ids are left is a question about the whole vocabulary. So every rank keeps allowed
ids and grammar as bits of all of it, which take V / 8 bytes per row. Drafts of a row count as
output, so draft i - 1 is then the latest token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpsample.core.vocab_shard import VocabShard
from tpsample.core.word import NO_TOKEN
from tpsample.request.controls.tables import ControlTables
from tpsample.request.controls.token_state import TokenState


@dataclass(frozen=True)
class ControlRows:
    """The controls of the rows of a step.

    Attributes:
        tables: the tables.
        slots: int64 [B], each row's slot.
        grammar_bitmask: int32 [B, ceil(V / 32)], bit v % 32 of word v // 32 allows id v; or None.
        forced: int64 [B], the only id allowed, -1 for any; or None.
        drafts: int32 [B, K], tokens to count as output beside the state's; or None.
        num_drafts: int32 [B], how many of each row's; None if drafts is.
    """

    tables: ControlTables
    slots: Tensor
    grammar_bitmask: Tensor | None = None
    forced: Tensor | None = None
    drafts: Tensor | None = None
    num_drafts: Tensor | None = None

    @property
    def masked(self) -> bool:
        """Whether some ids may be forbidden."""
        return self.tables.has_masks or self.grammar_bitmask is not None or self.forced is not None

    def after_drafts(self, drafts: Tensor) -> ControlRows:
        """Return the controls of each row after 0 … K of its drafts, int32 [B, K].

        The masks have the B · (K + 1) rows of the result already.
        """
        times = drafts.shape[1] + 1
        if times == 1:
            return self
        slots = self.slots.repeat_interleave(times)
        counts = torch.arange(times, dtype=torch.int32, device=drafts.device)
        return replace(
            self,
            slots=slots,
            drafts=drafts.repeat_interleave(times, dim=0),
            num_drafts=counts.repeat(len(drafts)),
        )


def build_mask(rows: ControlRows, state: TokenState) -> Tensor:
    """Return int32 [B, width / 32]: bit c % 32 of word c // 32 is set if column c may be drawn."""
    tables, slots = rows.tables, rows.slots
    mask = state.mask_buffer(len(slots))
    free = tables.whole.expand(len(slots), -1)
    if tables.allowed is not None:
        free = tables.allowed[slots]
    if rows.grammar_bitmask is not None:
        free = free & rows.grammar_bitmask
    mask.copy_(shard_of_bitmask(free, state.first_id, mask.shape[1]))
    if tables.has_masks:
        for ids in (_stop_ids(rows, free), _completions(rows)):
            for token_ids in ids.unbind(dim=1):
                mask &= ~single_bit(token_ids, state.first_id, mask.shape[1])
    if rows.forced is not None:
        forced = single_bit(rows.forced, state.first_id, mask.shape[1])
        mask.copy_(torch.where((rows.forced != NO_TOKEN).unsqueeze(1), forced, mask))
    return mask


def _stop_ids(rows: ControlRows, free: Tensor) -> Tensor:
    """Return int32 [B, S], the stop ids that are held back, -1 for the others.

    Args:
        free: int32 [B, ceil(V / 32)], what allowed ids and grammar leave.
    """
    tables, slots = rows.tables, rows.slots
    length = tables.length[slots] + (0 if rows.num_drafts is None else rows.num_drafts)
    held_back = length < tables.min_tokens[slots]
    stop_ids, others = tables.stop_ids[slots], free
    for token_ids in stop_ids.unbind(dim=1):
        others = others & ~single_bit(token_ids, 0, free.shape[1])
    held_back &= (others != 0).any(dim=1)
    return stop_ids.where(held_back.unsqueeze(1), NO_TOKEN)


def _completions(rows: ControlRows) -> Tensor:
    """Return int32 [B, N], the last id of each bad word that its row has begun, else -1."""
    words, recent = rows.tables.bad_words[rows.slots], _recent(rows)
    begun = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
    for j in range(1, words.shape[2]):
        wanted = words[:, :, j]
        begun &= (wanted == NO_TOKEN) | (wanted == recent[:, j - 1, None])
    return words[:, :, 0].where(begun, NO_TOKEN)


def _recent(rows: ControlRows) -> Tensor:
    """Return int32 [B, L - 1 or 1], the latest tokens of each row, drafts before output."""
    recent = rows.tables.recent[rows.slots]
    if rows.drafts is None or rows.num_drafts is None:
        return recent
    column = torch.arange(recent.shape[1], device=recent.device)
    count = rows.num_drafts.unsqueeze(1)
    draft = rows.drafts.gather(1, (count - 1 - column).clamp(min=0).long())
    return draft.where(column < count, recent.gather(1, (column - count).clamp(min=0).long()))


@dataclass(frozen=True)
class StepControls:
    """The controls of a step's rows over one shard, with the shard's state.

    Attributes:
        mask: int32 [B, width / 32], the ids a row may draw in this step; None if it may draw all.
    """

    rows: ControlRows
    state: TokenState
    mask: Tensor | None

    @staticmethod
    def of(
        rows: ControlRows,
        shard: VocabShard,
        make_mask: Callable[[ControlRows, TokenState], Tensor] = build_mask,
    ) -> StepControls:
        """Find the controls of some rows over a shard; errors are those of `ControlTables.state`.

        Args:
            make_mask: `build_mask`, or its kernel.
        """
        state = rows.tables.state(shard)
        return StepControls(rows, state, make_mask(rows, state) if rows.masked else None)

    def apply(self, logits: Tensor, first_id: int) -> Tensor:
        """Process fp32 logits [B, n] of the ids from `first_id` on, all of this shard."""
        slots, tables, state = self.rows.slots, self.rows.tables, self.state
        start, num_ids = first_id - state.first_id, logits.shape[1]
        columns = slice(start, start + num_ids)
        if self.mask is not None:
            column = torch.arange(start, start + num_ids, device=logits.device)
            allowed = (self.mask[:, column >> 5] >> (column & 31)) & 1 != 0
            logits = torch.where(allowed, logits, -torch.inf)
        if tables.has_bias:
            logits = logits + state.bias[slots, columns]
        if tables.has_penalties:
            history = self._history(columns, first_id)
            repetition, frequency, presence = tables.penalties[slots].unsqueeze(1).unbind(dim=-1)
            scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(history != 0, scaled, logits)
            count = history >> 1
            logits = logits - frequency * count
            logits = logits - presence * (count > 0)
        return logits

    def _history(self, columns: slice, first_id: int) -> Tensor:
        history = self.state.history[self.rows.slots, columns]
        drafts, num_drafts = self.rows.drafts, self.rows.num_drafts
        if drafts is None or num_drafts is None:
            return history
        ids = torch.arange(first_id, first_id + history.shape[1], device=history.device)
        for k in range(drafts.shape[1]):
            counted = (drafts[:, k] == ids[:, None]) & (k < num_drafts)
            history = history + 2 * counted.T.to(torch.int32)
        return history


def shard_of_bitmask(bitmask: Tensor, first_id: int, words: int) -> Tensor:
    """Return int32 [B, words]: the bits of [B, ceil(V / 32)] from `first_id` on, then zeros."""
    start, shift = divmod(first_id, 32)
    part = bitmask[:, start : start + words + 1].long() & 0xFFFFFFFF
    part = torch.nn.functional.pad(part, (0, words + 1 - part.shape[1]))
    bits = (part[:, 1:] << 32 | part[:, :-1]) >> shift & 0xFFFFFFFF
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def single_bit(token_ids: Tensor, first_id: int, words: int) -> Tensor:
    """Return int32 [B, words] with the bit of each row's id, int [B]; no bit for an id that is not
    among the columns from `first_id` on."""
    column = token_ids.long().unsqueeze(1) - first_id
    column = column.where(token_ids.unsqueeze(1) >= 0, -1)
    word = torch.arange(words, device=token_ids.device)
    bit = torch.ones_like(column, dtype=torch.int32) << (column & 31).to(torch.int32)
    return torch.where(column >> 5 == word, bit, 0)
