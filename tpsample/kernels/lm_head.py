"""hidden states × vocabulary shard → logits tile → score → candidate → rank maximum.

One program per (vocabulary tile, batch tile). The vocabulary lies on the M axis of the matrix
instruction, so small batches still use wgmma / tcgen05. The accumulator is carried over the whole
hidden size in ascending order: no split-K, so a logit's bits depend on neither tile nor batch.
"""

import triton
import triton.language as tl

from tpsample.kernels.epilogue import store_candidates
from tpsample.kernels.inbox import chunk_of_tile, push_last_arrival, tiles_of_chunk
from tpsample.kernels.row_noise import store_row_noise


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
    do_not_specialize=[
        "num_rows",
        "num_samples",
        "num_stored",
        "vocab_start",
        "vocab_stop",
        "first_tile",
        "num_tiles",
        "num_chunks",
        "rank",
        "world_size",
        "max_rows",
        "max_drafts",
    ],
    # Read and written one row at a time; a view of them must not compile another kernel.
    do_not_specialize_on_alignment=["seed_ptr", "position_ptr", "temperature_ptr", "words_ptr"],
)
def lm_head_kernel(
    # inputs
    hidden_ptr,  # [num_rows, HIDDEN_SIZE]
    stride_hidden_b,
    weight_ptr,  # [V_local, HIDDEN_SIZE], same dtype
    stride_weight_v,
    bias_ptr,  # [V_local] or unused
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    slot_ptr,  # [num_rows] int32, place among the stored rows or -1; for STORE_LOGITS
    # scratch, see store_row_noise
    stream_ptr,  # [4, ≥ num_samples · num_rows + BLOCK_B] int32
    stride_stream,
    scale_ptr,  # [≥ num_rows + BLOCK_B] fp32
    # outputs
    logits_ptr,  # [num_stored, V_local] fp32, then the same processed; for STORE_LOGITS
    stride_logits_b,
    num_stored,  # 0 without request controls
    words_ptr,  # [num_samples · num_rows] int64, zero between steps; PUSH: [num_chunks, max_rows]
    # request controls of the rows, see `kernels.controls`
    state_slot_ptr,  # [num_rows] int64
    wants_ptr,  # [slots] int32
    penalty_ptr,  # [slots, 3] fp32
    touched_ptr,  # [slots, state_width / 64] int32
    history_ptr,  # [slots, state_width] int32; for PENALTIES
    token_bias_ptr,  # [slots, state_width] fp32; for BIASES
    mask_ptr,  # [num_rows, state_width / 32] int32; for MASKS
    draft_ptr,  # [num_rows, max_drafts] int32; for DRAFTS
    num_drafts_ptr,  # [num_rows] int32; for DRAFTS
    state_width,
    max_drafts,
    # peers, for PUSH
    arrive_ptr,  # [num_chunks, max_rows] int32, zero between steps
    epoch_ptr,  # [1] int64
    lost_ptr,  # [4] int64, see `peer_finish_kernel`
    inboxes_ptr,  # [world_size] int64, addresses of every rank's inbox
    # sizes
    num_rows,
    num_samples,
    # shard: global ids [vocab_start, vocab_stop); tiles are counted from vocab_start & ~3
    vocab_start,
    vocab_stop,
    first_tile,
    num_tiles,  # of the shard; PUSH: at least num_chunks, so that every chunk is pushed
    # peers, for PUSH
    num_chunks,
    rank,
    world_size,
    max_rows,
    # head
    logit_scale,
    logit_softcap,
    # flags
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_LOGITS: tl.constexpr,
    MASKS: tl.constexpr,
    BIASES: tl.constexpr,
    PENALTIES: tl.constexpr,
    DRAFTS: tl.constexpr,
    MANY_SAMPLES: tl.constexpr,
    ROUNDS: tl.constexpr,
    INTERPRET: tl.constexpr,
    PUSH: tl.constexpr,  # the last program of a chunk writes its words to every rank's inbox
    # blocks
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # rows of the epilogue at a time
    BLOCK_W: tl.constexpr,
):
    # Which tile. Batch tiles of one vocabulary tile are neighbours, so they share it in L2.
    num_batch_tiles = tl.cdiv(num_rows, BLOCK_B)
    pid_v = first_tile + tl.program_id(0) // num_batch_tiles
    pid_b = tl.program_id(0) % num_batch_tiles
    first_id = vocab_start // 4 * 4 + pid_v * BLOCK_V
    offs_b = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    if PUSH:
        chunk = chunk_of_tile(pid_v, num_tiles, num_chunks)
        words_ptr += chunk * max_rows

    # A tile past the shard has no rows: it only counts as arrived.
    if (first_id < vocab_stop) & (vocab_start < vocab_stop):
        store_row_noise(
            seed_ptr,
            position_ptr,
            temperature_ptr,
            stream_ptr,
            stride_stream,
            scale_ptr,
            offs_b,
            num_rows,
            num_samples,
            MANY_SAMPLES,
            INTERPRET,
        )

        # Rows past an edge read a row within it and are masked after.
        offs_v = first_id + tl.arange(0, BLOCK_V)
        row_v = tl.minimum(tl.maximum(offs_v, vocab_start), vocab_stop - 1) - vocab_start
        product = product_tile(
            hidden_ptr,
            stride_hidden_b,
            weight_ptr,
            stride_weight_v,
            row_v,
            tl.minimum(offs_b, num_rows - 1),
            HIDDEN_SIZE,
            BLOCK_V,
            BLOCK_B,
            BLOCK_D,
            INTERPRET,
        )

        controls = (
            state_slot_ptr, wants_ptr, penalty_ptr, touched_ptr, history_ptr, token_bias_ptr,
            mask_ptr, draft_ptr, num_drafts_ptr, state_width, max_drafts,
        )  # fmt: skip
        # Epilogue: every row's best candidate of the tile, into the maximum over the rank's tiles.
        store_candidates(
            product,
            pid_b * BLOCK_B,
            first_id,
            vocab_start,
            vocab_stop,
            bias_ptr,
            stream_ptr,
            stride_stream,
            scale_ptr,
            slot_ptr,
            logits_ptr,
            stride_logits_b,
            num_stored,
            controls,
            words_ptr,
            num_rows,
            num_samples,
            logit_scale,
            logit_softcap,
            HAS_SCALE,
            HAS_SOFTCAP,
            HAS_BIAS,
            STORE_LOGITS,
            MASKS,
            BIASES,
            PENALTIES,
            DRAFTS,
            MANY_SAMPLES,
            ROUNDS,
            INTERPRET,
            BLOCK_V,
            BLOCK_B,
            BLOCK_E,
        )

    # Push: the words of a complete chunk, to every rank.
    if PUSH:
        push_last_arrival(
            words_ptr,
            arrive_ptr + chunk * max_rows + pid_b,
            tiles_of_chunk(chunk, num_tiles, num_chunks),
            epoch_ptr,
            lost_ptr,
            inboxes_ptr,
            chunk,
            offs_b,
            num_rows,
            num_samples,
            num_chunks,
            rank,
            world_size,
            max_rows,
            MANY_SAMPLES,
            BLOCK_W,
        )
