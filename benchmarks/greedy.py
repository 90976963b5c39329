"""A plain greedy LM-head kernel: what the cost of the epilogue is counted against.

The same product, then what one writes first: mask every tile, one (value, index) reduction, store
both. The published epilogue was counted against the same, so the two costs compare. It makes the
streams and scales of its rows too, whose cost goes with rows, not with logits: that is counted
alone, as `row_noise_kernel`.
"""

import triton
import triton.language as tl

from tpsample.kernels.lm_head import product_tile
from tpsample.kernels.row_noise import Rows, store_row_noise


@triton.jit(do_not_specialize=["num_rows"])
def row_noise_kernel(
    # inputs
    seed_ptr,
    position_ptr,
    temperature_ptr,
    # outputs
    stream_ptr,
    stride_stream,
    scale_ptr,
    # sizes
    num_rows,
    BLOCK_B: tl.constexpr,
):
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    rows = Rows(num_rows, None, stream_ptr, stride_stream, scale_ptr)
    store_row_noise(rows, seed_ptr, position_ptr, temperature_ptr, offs_b)


@triton.jit(do_not_specialize=["num_rows", "vocab_start", "vocab_stop"])
def greedy_kernel(
    # inputs
    hidden_ptr,  # [num_rows, HIDDEN_SIZE]
    stride_hidden_b,
    weight_ptr,  # [V_local, HIDDEN_SIZE], same dtype
    stride_weight_v,
    seed_ptr,
    position_ptr,
    temperature_ptr,
    # outputs
    stream_ptr,
    stride_stream,
    scale_ptr,
    value_ptr,  # [num_tiles, num_rows] fp32
    index_ptr,  # [num_tiles, num_rows] int32
    # sizes
    num_rows,
    vocab_start,
    vocab_stop,
    # blocks
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_batch_tiles = tl.cdiv(num_rows, BLOCK_B)
    first_id = vocab_start // 4 * 4 + tl.program_id(0) // num_batch_tiles * BLOCK_V
    offs_v = first_id + tl.arange(0, BLOCK_V)
    offs_b = tl.program_id(0) % num_batch_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    row_v = tl.minimum(tl.maximum(offs_v, vocab_start), vocab_stop - 1) - vocab_start
    row_b = tl.minimum(offs_b, num_rows - 1)
    rows = Rows(num_rows, None, stream_ptr, stride_stream, scale_ptr)
    store_row_noise(rows, seed_ptr, position_ptr, temperature_ptr, offs_b)

    logits_tile = product_tile(
        hidden_ptr, stride_hidden_b, weight_ptr, stride_weight_v, row_v, row_b, HIDDEN_SIZE, BLOCK_D
    )
    mask_v = (offs_v >= vocab_start) & (offs_v < vocab_stop)
    logits_tile = tl.where(mask_v[:, None], logits_tile, float("-inf"))

    value, index = tl.max(logits_tile, axis=0, return_indices=True)
    out = tl.program_id(0) // num_batch_tiles * num_rows + offs_b
    tl.store(value_ptr + out, value, mask=offs_b < num_rows)
    tl.store(index_ptr + out, first_id + index, mask=offs_b < num_rows)
