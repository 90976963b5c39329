"""How the kernels over stored logits are compiled for the report: as the launches of
`tpsample.logits.shard_logits_triton` and its neighbours, with 8 ranks and every feature."""

from __future__ import annotations

from typing import Any

from tpsample.core.order import DIGIT_BITS
from tpsample.logits.filters import BEST_SCORES
from tpsample.logits.shard_logits import GROUP
from tpsample.logits.shard_logits_triton import BLOCK, NUM_WARPS
from tpsample.request.filters import MAX_TOP_WORDS

STORED_TYPES = {
    "gathered_ptr": "*i64",
    "group_ptr": "*i64",
    "best_scores_ptr": "*i64",
    "best_ptr": "*i64",
    "first_ptr": "*i64",
    "sums_ptr": "*i64",
    "marks_ptr": "*i64",
    "counts_ptr": "*i64",
    "cut_ptr": "*i64",
    "bins_ptr": "*i64",
    "prefix_ptr": "*i64",
    "reached_ptr": "*i64",
    "limit_ptr": "*i64",
    "next_prefix_ptr": "*i64",
    "next_reached_ptr": "*i64",
    "next_limit_ptr": "*i64",
    "row_ptr": "*i64",
    "top_k_ptr": "*i64",
    "top_ptr": "*fp32",
    "top_p_ptr": "*fp64",
    "log_min_p_ptr": "*fp64",
    "total_log_min_p_ptr": "*fp64",
    "keep_ties_ptr": "*i1",
    "decided_ptr": "*i1",
    "row_done_ptr": "*i1",
}

_LEADING = {"COUNT": BEST_SCORES, "WORDS": 8 * BEST_SCORES}
_BLOCK = {"BLOCK": BLOCK}

STORED: dict[str, tuple[dict[str, Any], int]] = {
    f"tpsample.kernels.{kernel}_kernel": (
        constants,
        NUM_WARPS if _BLOCK.items() <= constants.items() else 4,
    )
    for kernel, constants in {
        "best_scores:group_best": {"GROUP": GROUP, **_BLOCK},
        "best_scores:best_scores": {
            "COUNT": BEST_SCORES,
            "GROUP": GROUP,
            "WORDS": BEST_SCORES * GROUP,
            "BLOCKS": 64,
        },
        "best_scores:before": {**_LEADING, **_BLOCK},
        "best_scores:first_kept": _LEADING,
        "first_words:group_first": {"GROUP": GROUP, **_BLOCK},
        "first_words:group_words": {"GROUP": GROUP},
        "sums:top_words": {"BLOCK": MAX_TOP_WORDS},
        "sums:mass": _BLOCK,
        "sums:min_p_cut": {},
        "sums:count": _BLOCK,
        "digits:digit": {"MASS": True, "DIGIT_BITS": DIGIT_BITS, **_BLOCK},
        "digits:next_digit": {"DIGIT_BITS": DIGIT_BITS},
        "sums:best_kept": _BLOCK,
        "decode:write_tokens": {},
    }.items()
}
"""Compile-time arguments and warps by kernel."""
