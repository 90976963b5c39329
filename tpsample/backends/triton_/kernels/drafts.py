"""Draws of a drafter from its logits. Twin: `tpsample.backends.torch_.drafts`."""

import triton.language as tl

from tpsample.backends.triton_.kernels.laws import block_of
from tpsample.backends.triton_.kernels.noise import fma, noise_tile, row_scale, row_stream
from tpsample.backends.triton_.kernels.order import best_of_groups, load_draw, row_kernel


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
    """The best score word of each row. Grid: (blocks, B)."""
    row = tl.program_id(1)
    block = block_of(vocab_start, lead, width, BLOCK)
    address = logits_ptr + row.to(tl.int64) * stride_logits + block.columns
    logits = tl.load(address, mask=block.mask, other=float("-inf")).to(tl.float32)
    draw = load_draw(seed_ptr, position_ptr, temperature_ptr, row)
    scale, gain = row_scale(draw.temperature)
    r0, r1, r2 = row_stream(draw.seed, draw.position, sample, DOMAIN)
    quads = block.first_id // 4 + tl.arange(0, BLOCK // 4)
    noise = noise_tile(quads, r0, r1, r2).reshape(logits.shape)
    scores = fma(logits, scale, noise * gain)
    best = best_of_groups(scores, block.ids, block.mask, BLOCK)
    tl.atomic_max(words_ptr + row + tl.arange(0, 1), best, sem="relaxed")
