"""Penalties and constraints applied to a logits tile on chip. Twin: `token_state.StepControls`."""

import triton
import triton.language as tl

from tpsample.request.controls import tables as controls
from tpsample.request.controls import token_state

PENALISED = tl.constexpr(controls.PENALISED)
BIASED = tl.constexpr(controls.BIASED)
HAS_HISTORY = tl.constexpr(token_state.HAS_HISTORY)
TOUCHED_BLOCK = tl.constexpr(token_state.TOUCHED_BLOCK)


@triton.jit
def control_tile(
    logits_tile,  # [BLOCK_V, rows] fp32
    first_id,
    vocab_start,
    offs_b,
    num_rows,
    controls,  # the pointers of `lm_head_kernel`, in its order
    MASKS: tl.constexpr,
    BIASES: tl.constexpr,
    PENALTIES: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Processed logits: mask, then bias, then repetition, frequency and presence penalty.

    History and bias are read only for rows that want them, and only where something is known of
    the tile's ids; a tile where no row does skips both.
    """
    (
        state_slot_ptr, wants_ptr, penalty_ptr, touched_ptr, history_ptr, token_bias_ptr,
        mask_ptr, draft_ptr, num_drafts_ptr, width, max_drafts,
    ) = controls  # fmt: skip
    first_column = first_id - vocab_start // 4 * 4
    column = first_column + tl.arange(0, BLOCK_V)
    in_state = column < width
    is_row = offs_b < num_rows
    if MASKS:
        # A word covers 32 columns; it is loaded once per element, from cache.
        words = mask_ptr + offs_b.to(tl.int64)[None, :] * (width // 32) + (column >> 5)[:, None]
        word = tl.load(words, mask=in_state[:, None] & is_row[None, :], other=0)
        logits_tile = tl.where(
            (word >> (column & 31)[:, None]) & 1 != 0, logits_tile, float("-inf")
        )

    if BIASES or PENALTIES:
        slot = tl.load(state_slot_ptr + offs_b, mask=is_row, other=0)
        touched = slot.to(tl.int32) * 0
        for i in tl.static_range(max(1, BLOCK_V // TOUCHED_BLOCK)):
            block = first_column // TOUCHED_BLOCK + i
            inside = is_row & (block < width // TOUCHED_BLOCK)
            blocks = touched_ptr + slot * (width // TOUCHED_BLOCK) + block
            touched |= tl.load(blocks, mask=inside, other=0)
        if DRAFTS:
            touched |= HAS_HISTORY
        wants = tl.load(wants_ptr + slot, mask=is_row, other=0) & touched
        if tl.max(wants, axis=0) != 0:
            place = slot[None, :] * width + column[:, None]
            if BIASES:
                biased = in_state[:, None] & (wants & BIASED != 0)[None, :]
                logits_tile += tl.load(token_bias_ptr + place, mask=biased, other=0.0)
            if PENALTIES:
                penalised = wants & PENALISED != 0
                history = tl.load(
                    history_ptr + place, mask=in_state[:, None] & penalised[None, :], other=0
                )
                if DRAFTS:
                    offs_v = first_id + tl.arange(0, BLOCK_V)
                    num_drafts = tl.load(num_drafts_ptr + offs_b, mask=is_row, other=0)
                    for k in range(max_drafts):
                        draft = tl.load(
                            draft_ptr + offs_b * max_drafts + k,
                            mask=penalised & (k < num_drafts),
                            other=-1,
                        )
                        history += 2 * (draft[None, :] == offs_v[:, None]).to(tl.int32)
                penalty = penalty_ptr + slot * 3
                repetition = tl.load(penalty, mask=penalised, other=1.0)[None, :]
                frequency = tl.load(penalty + 1, mask=penalised, other=0.0)[None, :]
                presence = tl.load(penalty + 2, mask=penalised, other=0.0)[None, :]
                scaled = tl.where(
                    logits_tile > 0.0,
                    tl.div_rn(logits_tile, tl.broadcast_to(repetition, logits_tile.shape)),
                    logits_tile * repetition,
                )
                logits_tile = tl.where(history != 0, scaled, logits_tile)
                count = history >> 1
                logits_tile = logits_tile - frequency * count.to(tl.float32)
                logits_tile = logits_tile - tl.where(count > 0, presence, 0.0)
    return logits_tile
