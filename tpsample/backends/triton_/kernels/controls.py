"""Penalties and constraints applied to a logits tile on chip.

Twin: `tpsample.request.controls.apply.StepControls`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.core import touched as touched_blocks
from tpsample.request.controls import tables

PENALISED = Constant(tables.PENALISED)
BIASED = Constant(tables.BIASED)
HAS_HISTORY = Constant(touched_blocks.HAS_HISTORY)
TOUCHED_BLOCK = Constant(touched_blocks.TOUCHED_BLOCK)


class Controls(NamedTuple):
    """The request controls of a step's rows; all None without any.

    Tables hold a slot per request; `width` columns of a state begin at the shard's first id,
    rounded down to a multiple of four.
    """

    slot_ptr: tl.tensor | None  # [num_rows] int64
    wants_ptr: tl.tensor | None  # [slots] int32
    penalty_ptr: tl.tensor | None  # [slots, 3] fp32
    touched_ptr: tl.tensor | None  # [slots, width / 64] int32
    history_ptr: tl.tensor | None  # [slots, width] int32; None without penalties
    bias_ptr: tl.tensor | None  # [slots, width] fp32; None without biases
    mask_ptr: tl.tensor | None  # [num_rows, width / 32] int32; None without masks
    draft_ptr: tl.tensor | None  # [num_rows, max_drafts] int32; None if no draft is penalised
    num_drafts_ptr: tl.tensor | None  # [num_rows] int32
    width: tl.tensor | None
    max_drafts: tl.tensor | None


@triton.jit
def control_tile(logits_tile, scoring, offs_v, offs_b):
    """Processed logits: mask, then bias, then repetition, frequency and presence penalty.

    History and bias are read only for rows that want them, and only where something is known of
    the tile's ids. A tile in which no row does skips both.
    """
    ids, controls = scoring.ids, scoring.controls
    BLOCK_V: tl.constexpr = logits_tile.shape[0]
    width, first_id = controls.width, scoring.shard.start // 4 * 4
    column = offs_v - first_id
    in_state = column < width
    is_row = offs_b < scoring.rows.num_rows
    if controls.mask_ptr is not None:
        # A word covers 32 columns; it is loaded once per element, from cache.
        words = controls.mask_ptr + offs_b.to(tl.int64)[None, :] * (width // 32)
        words += (column >> 5)[:, None]
        word = tl.load(words, mask=in_state[:, None] & is_row[None, :], other=0)
        logits_tile = tl.where(
            (word >> (column & 31)[:, None]) & 1 != 0, logits_tile, float("-inf")
        )

    if controls.bias_ptr is not None or controls.history_ptr is not None:
        slot = tl.load(controls.slot_ptr + offs_b, mask=is_row, other=0)
        touched = slot.to(tl.int32) * 0
        if ids.listed_ptr is not None:
            touched |= HAS_HISTORY | BIASED  # few ids: not worth asking
        else:
            first_block = (ids.first - first_id) // TOUCHED_BLOCK
            num_blocks = width // TOUCHED_BLOCK
            for i in tl.static_range(max(1, BLOCK_V // TOUCHED_BLOCK)):
                # The last tile may end after the last block; reading that one twice does no harm.
                block = tl.minimum(first_block + i, num_blocks - 1)
                blocks = controls.touched_ptr + slot * num_blocks + block
                touched |= tl.load(blocks, mask=is_row, other=0)
        if controls.draft_ptr is not None:
            touched |= HAS_HISTORY
        wants = tl.load(controls.wants_ptr + slot, mask=is_row, other=0) & touched
        if tl.max(wants, axis=0) != 0:
            place = slot[None, :] * width + column[:, None]
            if controls.bias_ptr is not None:
                biased = in_state[:, None] & (wants & BIASED != 0)[None, :]
                logits_tile += tl.load(controls.bias_ptr + place, mask=biased, other=0.0)
            if controls.history_ptr is not None:
                penalised = wants & PENALISED != 0
                in_history = in_state[:, None] & penalised[None, :]
                history = tl.load(controls.history_ptr + place, mask=in_history, other=0)
                if controls.draft_ptr is not None:
                    num_drafts = tl.load(controls.num_drafts_ptr + offs_b, mask=is_row, other=0)
                    for k in range(controls.max_drafts):
                        draft = tl.load(
                            controls.draft_ptr + offs_b * controls.max_drafts + k,
                            mask=penalised & (k < num_drafts),
                            other=-1,
                        )
                        history += 2 * (draft[None, :] == offs_v[:, None]).to(tl.int32)
                penalty = controls.penalty_ptr + slot * 3
                logits_tile = penalise(logits_tile, history, penalty, penalised)
    return logits_tile


@triton.jit
def penalise(logits_tile, history, penalty, penalised):
    """Apply the repetition, frequency and presence penalty, in this order.

    A history is 0 for an id that the request does not hold. Else it is 2 · (times the id was
    drawn), plus 1 if it is in the prompt.
    """
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
    return logits_tile - tl.where(count > 0, presence, 0.0)
