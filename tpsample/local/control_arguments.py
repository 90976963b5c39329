"""Request controls as arguments of Triton launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpsample.kernels.token_mask import token_mask_kernel
from tpsample.request.controls.apply import StepControls
from tpsample.request.controls.rows import ControlRows
from tpsample.request.controls.token_state import TokenState


def make_mask(rows: ControlRows, state: TokenState) -> Tensor:
    """`tpsample.request.controls.token_mask.build_mask` by the kernel, one program per row."""
    tables = rows.tables
    mask = state.mask_buffer(len(rows.slots))
    grammar, drafts = rows.grammar_bitmask, rows.drafts
    token_mask_kernel[(len(rows.slots),)](
        state_slot_ptr=rows.slots,
        allowed_ptr=tables.allowed,
        grammar_ptr=grammar,
        stride_grammar_b=0 if grammar is None else grammar.stride(0),
        forced_ptr=rows.forced,
        min_tokens_ptr=tables.min_tokens,
        length_ptr=tables.length,
        stop_ptr=tables.stop_ids,
        bad_word_ptr=tables.bad_words,
        recent_ptr=tables.recent,
        draft_ptr=drafts,
        num_drafts_ptr=rows.num_drafts,
        mask_ptr=mask,
        first_id=state.first_id,
        width=state.width,
        vocab_size=tables.vocab_size,
        num_stop=tables.stop_ids.shape[1],
        num_bad=tables.bad_words.shape[1],
        bad_length=tables.bad_words.shape[2],
        num_recent=tables.recent.shape[1],
        max_drafts=0 if drafts is None else drafts.shape[1],
        TABLES=tables.has_masks,
        ALLOWED=tables.allowed is not None,
        GRAMMAR=grammar is not None,
        FORCED=rows.forced is not None,
        DRAFTS=drafts is not None,
        BLOCK=256,
        BLOCK_N=32,
    )
    return mask


def control_arguments(controls: StepControls | None) -> dict[str, Any]:
    """What `lm_head_kernel` takes of a step's controls; None, which compiles to nothing, for what
    is off."""
    if controls is None:
        return _OFF
    rows, state, tables = controls.rows, controls.state, controls.rows.tables
    return {
        "state_slot_ptr": rows.slots,
        "wants_ptr": tables.wants,
        "penalty_ptr": tables.penalties,
        "touched_ptr": state.touched,
        "history_ptr": state.history,
        "token_bias_ptr": state.bias,
        "mask_ptr": controls.mask,
        "draft_ptr": rows.drafts,
        "num_drafts_ptr": rows.num_drafts,
        "state_width": state.width,
        "max_drafts": 0 if rows.drafts is None else rows.drafts.shape[1],
        "MASKS": controls.mask is not None,
        "BIASES": tables.has_bias,
        "PENALTIES": tables.has_penalties,
        "DRAFTS": rows.drafts is not None and tables.has_penalties,
    }


CONTROL_POINTERS = (
    "state_slot_ptr",
    "wants_ptr",
    "penalty_ptr",
    "touched_ptr",
    "history_ptr",
    "token_bias_ptr",
    "mask_ptr",
    "draft_ptr",
    "num_drafts_ptr",
)

_OFF: dict[str, Any] = dict.fromkeys(CONTROL_POINTERS) | {
    "state_width": 0,
    "max_drafts": 0,
    "MASKS": False,
    "BIASES": False,
    "PENALTIES": False,
    "DRAFTS": False,
}
