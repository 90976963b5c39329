"""The ids each row may draw in a step, as packed bits over one shard. Twin: `kernels.token_mask`.

    allowed_token_ids ∧ grammar bitmask, then without stop ids while the output is shorter than
    min_tokens, unless stop ids are all that is left, and without the last id of every bad word
    whose other ids are the latest output; a forced token stands alone

Whether only stop ids are left is a question about the whole vocabulary, so every rank keeps allowed
ids and grammar as bits of all of it, which take V / 8 bytes per row.

Drafts of a row count as output, so draft i - 1 is then the latest token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.core.word import NO_TOKEN
from tpsample.request.controls.bits import shard_of_bitmask, single_bit
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.token_state import TokenState


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
        mask.copy_(torch.where((rows.forced >= 0).unsqueeze(1), forced, mask))
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
    place = torch.arange(recent.shape[1], device=recent.device)
    count = rows.num_drafts.unsqueeze(1)
    draft = rows.drafts.gather(1, (count - 1 - place).clamp(min=0).long())
    return draft.where(place < count, recent.gather(1, (place - count).clamp(min=0).long()))
