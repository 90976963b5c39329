"""hidden states × vocabulary shard → logits tile → score → candidate → rank maximum.

One program per (vocabulary tile, batch tile). The vocabulary lies on the M axis of the matrix
instruction, so small batches still use wgmma / tcgen05. The accumulator is carried over the whole
hidden size in ascending order: no split-K, so a logit's bits depend on neither tile nor batch.
"""

import triton
import triton.language as tl

from tpsample.kernels.epilogue import best_word, head_tile, score_tile, store_logits


@triton.jit
def product_tile(
    hidden_ptr,
    stride_hidden_b,
    weight_ptr,
    stride_weight_v,
    row_v,
    row_b,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """weight[row_v] · hidden[row_b]^T, [BLOCK_V, BLOCK_B], accumulated in fp32.

    The interpreter accumulates in float64 and rounds once, as the PyTorch definition does
    (and its bf16 arithmetic is broken, so tiles are widened before the product).
    """
    offs_d = tl.arange(0, BLOCK_D)
    weight = weight_ptr + row_v.to(tl.int64)[:, None] * stride_weight_v + offs_d[None, :]
    hidden = hidden_ptr + row_b.to(tl.int64)[None, :] * stride_hidden_b + offs_d[:, None]
    ACCUMULATOR: tl.constexpr = tl.float64 if INTERPRET else tl.float32
    product = tl.zeros((BLOCK_V, BLOCK_B), ACCUMULATOR)
    for d in range(0, HIDDEN_SIZE, BLOCK_D):
        if HIDDEN_SIZE % BLOCK_D == 0:
            weight_tile = tl.load(weight + d)
            hidden_tile = tl.load(hidden + d)
        else:
            mask_d = offs_d < HIDDEN_SIZE - d
            weight_tile = tl.load(weight + d, mask=mask_d[None, :], other=0.0)
            hidden_tile = tl.load(hidden + d, mask=mask_d[:, None], other=0.0)
        if INTERPRET:
            weight_tile = weight_tile.to(tl.float32).to(tl.float64)
            hidden_tile = hidden_tile.to(tl.float32).to(tl.float64)
        product = tl.dot(
            weight_tile, hidden_tile, product, input_precision="ieee", out_dtype=ACCUMULATOR
        )
    return product.to(tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "num_samples", "vocab_start", "vocab_stop", "first_tile"]
)
def lm_head_kernel(
    # inputs
    hidden_ptr,  # [num_rows, HIDDEN_SIZE]
    stride_hidden_b,
    weight_ptr,  # [V_local, HIDDEN_SIZE], same dtype
    stride_weight_v,
    bias_ptr,  # [V_local] or unused
    stream_ptr,  # [num_samples · num_rows, 4] int32, from row_noise_kernel
    scale_ptr,  # [num_rows] fp32, log2 e / T
    slot_ptr,  # [num_rows] int32, place among the stored rows or -1; or unused
    # outputs
    logits_ptr,  # [stored rows, V_local] fp32; or unused
    stride_logits_b,
    words_ptr,  # [num_samples · num_rows] int64, zeroed before
    # sizes
    num_rows,
    num_samples,
    # shard: global ids [vocab_start, vocab_stop); tiles are counted from vocab_start & ~3
    vocab_start,
    vocab_stop,
    first_tile,
    # head
    logit_scale,
    logit_softcap,
    # flags
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_LOGITS: tl.constexpr,
    MANY_SAMPLES: tl.constexpr,
    ROUNDS: tl.constexpr,
    INTERPRET: tl.constexpr,
    # blocks
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Which tile. Batch tiles of one vocabulary tile are neighbours, so they share it in L2.
    num_batch_tiles = tl.cdiv(num_rows, BLOCK_B)
    pid_v = first_tile + tl.program_id(0) // num_batch_tiles
    pid_b = tl.program_id(0) % num_batch_tiles
    first_id = vocab_start // 4 * 4 + pid_v * BLOCK_V
    offs_v = first_id + tl.arange(0, BLOCK_V)
    offs_b = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows

    # Inner loop. Rows past an edge read a row within it and are masked after.
    row_v = tl.minimum(tl.maximum(offs_v, vocab_start), vocab_stop - 1) - vocab_start
    row_b = tl.minimum(offs_b, num_rows - 1)
    product = product_tile(
        hidden_ptr,
        stride_hidden_b,
        weight_ptr,
        stride_weight_v,
        row_v,
        row_b,
        HIDDEN_SIZE,
        BLOCK_V,
        BLOCK_B,
        BLOCK_D,
        INTERPRET,
    )

    # Epilogue.
    bias_v = tl.load(bias_ptr + row_v).to(tl.float32) if HAS_BIAS else 0.0
    logits_tile = head_tile(
        product, bias_v, logit_scale, logit_softcap, HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, INTERPRET
    )
    if (first_id < vocab_start) | (first_id + BLOCK_V > vocab_stop):
        mask_v = (offs_v >= vocab_start) & (offs_v < vocab_stop)
        logits_tile = tl.where(mask_v[:, None], logits_tile, float("-inf"))
    scale = tl.load(scale_ptr + row_b)
    if STORE_LOGITS:
        store_logits(
            logits_tile,
            logits_ptr,
            stride_logits_b,
            slot_ptr,
            offs_b,
            num_rows,
            offs_v,
            vocab_start,
            vocab_stop,
        )

    # Store: the maximum over the rank's tiles.
    if MANY_SAMPLES:
        for sample in range(num_samples):
            slot = sample * num_rows + row_b
            scores = score_tile(
                logits_tile, first_id, stream_ptr, scale, slot, BLOCK_V, BLOCK_B, ROUNDS, INTERPRET
            )
            word = best_word(scores, offs_v, INTERPRET)
            tl.atomic_max(words_ptr + slot, word, mask=mask_b, sem="relaxed", scope="gpu")
    else:
        scores = score_tile(
            logits_tile, first_id, stream_ptr, scale, row_b, BLOCK_V, BLOCK_B, ROUNDS, INTERPRET
        )
        word = best_word(scores, offs_v, INTERPRET)
        tl.atomic_max(words_ptr + row_b, word, mask=mask_b, sem="relaxed", scope="gpu")
