"""Draws of a drafter from its logits. Twin: `tpsample.backends.torch_.drafts`."""

import triton.language as tl

from tpsample.backends.triton_.kernels.order import (
    best_of_groups,
    block_scores,
    load_block,
    load_draw,
    row_kernel,
)


@row_kernel
def draft_kernel(
    # inputs
    logits_ptr,  # [B, V_local] of any floating dtype
    stride_logits,
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    temperature_ptr,  # [B] fp32
    # outputs
    words_ptr,  # [B] int64, zero before
    # sizes
    sample,
    vocab_start,
    lead,
    width,
    DOMAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score word of each row. Grid: (B, blocks)."""
    row = tl.program_id(0)
    logits, ids, mask, first_id = load_block(
        logits_ptr, stride_logits, vocab_start, lead, width, BLOCK
    )
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    scores = block_scores(logits.to(tl.float32), first_id, draw, sample, DOMAIN)
    best = best_of_groups(scores, ids, mask, BLOCK)
    tl.atomic_max(words_ptr + row + tl.arange(0, 1), best, sem="relaxed")
