"""The head and the request controls as arguments of Triton launches; masks and appended tokens as
launches of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpsample.backends.triton_.kernels.append import append_kernel
from tpsample.backends.triton_.kernels.token_mask import token_mask_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.core.score import Head
from tpsample.request.controls.apply import ControlRows, StepControls
from tpsample.request.controls.tables import ControlTables
from tpsample.request.controls.token_state import TokenState


def make_mask(rows: ControlRows, state: TokenState) -> Tensor:
    """Build the mask as `tpsample.request.controls.apply.build_mask` does, by one launch."""
    tables = rows.tables
    mask = state.mask_buffer(len(rows.slots))
    grammar, drafts = rows.grammar_bitmask, rows.drafts if tables.has_masks else None
    launch_kernel(
        token_mask_kernel,
        (len(rows.slots),),
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
        num_drafts_ptr=None if drafts is None else rows.num_drafts,
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
        BLOCK=256,
        BLOCK_N=32,
    )
    return mask


def append_tokens(tables: ControlTables, slots: Tensor, token_ids: Tensor) -> None:
    """Append tokens as `ControlTables.append` does, by a launch for each shard that has a state."""
    words = (tables.length, tables.recent) if tables.has_masks else (None, None)
    counting = (s for s in tables.states.values() if s.history.shape[1] > 1 and len(s.shard))
    states: list[TokenState | None] = [*counting]
    for state in states or [None] * tables.has_masks:
        launch_kernel(
            append_kernel,
            (len(slots),),
            slot_ptr=slots,
            token_ptr=token_ids,
            stride_token_b=token_ids.stride(0),
            stride_token_n=token_ids.stride(1),
            length_ptr=words[0],
            recent_ptr=words[1],
            history_ptr=state and state.history,
            touched_ptr=state and state.touched,
            num_tokens=token_ids.shape[1],
            num_recent=tables.recent.shape[1],
            idle_slot=tables.slots - 1,
            vocab_size=tables.vocab_size,
            shard_start=state.shard.start if state else 0,
            shard_stop=state.shard.stop if state else 0,
            first_id=state.first_id if state else 0,
            width=state.width if state else 0,
            num_warps=1,
        )
        words = None, None  # which count once


def control_arguments(controls: StepControls | None) -> dict[str, Any]:
    """Return the control arguments of `lm_head_kernel`; those that are off are None."""
    if controls is None:
        return dict.fromkeys(CONTROL_ARGUMENTS)
    rows, state, tables = controls.rows, controls.state, controls.rows.tables
    drafts = rows.drafts if tables.has_penalties else None
    values = (
        rows.slots,
        tables.wants,
        tables.penalties,
        state.touched,
        state.history if tables.has_penalties else None,
        state.bias if tables.has_bias else None,
        controls.mask,
        drafts,
        None if drafts is None else rows.num_drafts,
        state.width,
        0 if drafts is None else drafts.shape[1],
    )
    return dict(zip(CONTROL_ARGUMENTS, values, strict=True))


def has_edits(controls: dict[str, Any]) -> bool:
    """Return whether penalties or biases are among what `control_arguments` returned."""
    return controls["token_bias_ptr"] is not None or controls["history_ptr"] is not None


def head_arguments(head: Head, bias: Tensor | None) -> dict[str, Any]:
    """Return the arguments of kernels for the head; None for those that are off."""
    return {
        "logit_scale": None if head.logit_scale == 1.0 else float(head.logit_scale),
        "logit_softcap": None if head.logit_softcap is None else float(head.logit_softcap),
        "bias_ptr": bias,
    }


def early_launch(early: bool) -> dict[str, Any]:
    """Return the option that launches a kernel before the one ahead of it has ended.

    Triton has no such option for AMD's GPUs, and refuses it there.
    """
    return {"launch_pdl": True} if early else {}


CONTROL_ARGUMENTS = (
    "state_slot_ptr",
    "wants_ptr",
    "penalty_ptr",
    "touched_ptr",
    "history_ptr",
    "token_bias_ptr",
    "mask_ptr",
    "draft_ptr",
    "num_drafts_ptr",
    "state_width",
    "max_drafts",
)
