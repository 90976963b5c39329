"""Triton's type of every run-time argument of a kernel, by its name.

Those of weight, hidden states and bias follow the weight's dtype, and what is not here is an i32.
"""

from benchmarks.static.screen_builds import SCREEN_TYPES
from benchmarks.static.stored_builds import STORED_TYPES

TYPES = {
    "stream_ptr": "*i32",
    "scale_ptr": "*fp32",
    "words_ptr": "*i64",
    "seed_ptr": "*i64",
    "position_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "slot_ptr": "*i32",
    "logits_ptr": "*fp32",
    "value_ptr": "*fp32",
    "index_ptr": "*i32",
    "token_ptr": "*i64",
    "out_seed_ptr": "*i64",
    "status_ptr": "*i32",
    "arrive_ptr": "*i32",
    "done_ptr": "*i32",
    "epoch_ptr": "*i64",
    "inboxes_ptr": "*i64",
    "lost_ptr": "*i64",
    "state_slot_ptr": "*i64",
    "wants_ptr": "*i32",
    "penalty_ptr": "*fp32",
    "touched_ptr": "*i32",
    "history_ptr": "*i32",
    "token_bias_ptr": "*fp32",
    "mask_ptr": "*i32",
    "draft_ptr": "*i32",
    "num_drafts_ptr": "*i32",
    "allowed_ptr": "*i32",
    "grammar_ptr": "*i32",
    "forced_ptr": "*i64",
    "min_tokens_ptr": "*i32",
    "length_ptr": "*i32",
    "stop_ptr": "*i32",
    "bad_word_ptr": "*i32",
    "recent_ptr": "*i32",
    "logit_scale": "fp32",
    "logit_softcap": "fp32",
    **STORED_TYPES,
    **SCREEN_TYPES,
}
