"""The ids each row may draw in a step, as packed bits over one shard. Twin: `kernels.token_mask`.

    allowed_token_ids ∧ grammar bitmask, then without stop ids while the output is shorter than
    min_tokens, and without the last id of every bad word whose other ids are the latest output;
    a forced token stands alone

Drafts of a row count as output: draft i - 1 is then the latest token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpsample.word import NO_TOKEN

if TYPE_CHECKING:
    from tpsample.request.controls import ControlRows
    from tpsample.request.token_state import TokenState


def build_mask(rows: ControlRows, state: TokenState) -> Tensor:
    """int32 [B, width / 32]: bit c % 32 of word c // 32 is set if column c may be drawn."""
    tables, slots = rows.tables, rows.slots
    mask = state.mask_buffer(len(slots))
    if tables.has_masks:
        mask.copy_(state.allowed[slots])
    else:
        mask.fill_(-1)
    if rows.grammar_bitmask is not None:
        mask &= shard_of_bitmask(rows.grammar_bitmask, state.first_id, mask.shape[1])
    if tables.has_masks:
        for ids in (_stop_ids(rows), _completions(rows)):
            for token_ids in ids.unbind(dim=1):
                mask &= ~_single_bit(token_ids, state)
    if rows.forced is not None:
        forced = _single_bit(rows.forced, state)
        mask.copy_(torch.where((rows.forced >= 0).unsqueeze(1), forced, mask))
    return mask


def shard_of_bitmask(bitmask: Tensor, first_id: int, words: int) -> Tensor:
    """int32 [B, words]: the bits of int32 [B, ceil(V / 32)] from `first_id` on, then zeros."""
    start, shift = divmod(first_id, 32)
    part = bitmask[:, start : start + words + 1].long() & 0xFFFFFFFF
    part = torch.nn.functional.pad(part, (0, words + 1 - part.shape[1]))
    joined = (part[:, 1:] << 32 | part[:, :-1]) >> shift & 0xFFFFFFFF
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


def _stop_ids(rows: ControlRows) -> Tensor:
    """int32 [B, S], -1 where an id is not held back."""
    tables, slots = rows.tables, rows.slots
    length = tables.length[slots] + (0 if rows.num_drafts is None else rows.num_drafts)
    too_short = length < tables.min_tokens[slots]
    return tables.stop_ids[slots].where(too_short.unsqueeze(1), NO_TOKEN)


def _completions(rows: ControlRows) -> Tensor:
    """int32 [B, N], the last id of each bad word that its row has begun, else -1."""
    words, recent = rows.tables.bad_words[rows.slots], _recent(rows)
    begun = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
    for j in range(1, words.shape[2]):
        wanted = words[:, :, j]
        begun &= (wanted == NO_TOKEN) | (wanted == recent[:, j - 1, None])
    return words[:, :, 0].where(begun, NO_TOKEN)


def _recent(rows: ControlRows) -> Tensor:
    """int32 [B, L - 1 or 1], the latest tokens of each row, drafts before output."""
    recent = rows.tables.recent[rows.slots]
    if rows.drafts is None or rows.num_drafts is None:
        return recent
    place = torch.arange(recent.shape[1], device=recent.device)
    count = rows.num_drafts.unsqueeze(1)
    draft = rows.drafts.gather(1, (count - 1 - place).clamp(min=0).long())
    return draft.where(place < count, recent.gather(1, (place - count).clamp(min=0).long()))


def _single_bit(token_ids: Tensor, state: TokenState) -> Tensor:
    """int32 [B, width / 32] with the bit of each row's id, int [B], if the shard has it."""
    column = token_ids.long().unsqueeze(1) - state.first_id
    column = column.where(token_ids.unsqueeze(1) >= 0, -1)
    word = torch.arange(state.width // 32, device=token_ids.device)
    bit = torch.ones_like(column, dtype=torch.int32) << (column & 31).to(torch.int32)
    return torch.where(column >> 5 == word, bit, 0)
