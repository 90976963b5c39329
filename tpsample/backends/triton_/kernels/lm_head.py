"""hidden states × vocabulary shard → logits tile → score → candidate → rank maximum.

One program per (vocabulary tile, batch tile). The vocabulary lies on the M axis of the matrix
instruction, so small batches still use wgmma / tcgen05. The accumulator is carried over the whole
hidden size in ascending order: there is no split-K, so a logit's bits depend on neither tile nor
batch. Twin: `tpsample.backends.torch_.launch`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS
from tpsample.backends.triton_.kernels.controls import Controls
from tpsample.backends.triton_.kernels.head import (
    GROUP,
    HeadArguments,
    Outputs,
    Scoring,
    Shard,
    TileIds,
    store_candidates,
    token_ids,
    weight_rows,
)
from tpsample.backends.triton_.kernels.inbox import Peers, chunk_of_tile, push_last_arrival
from tpsample.backends.triton_.kernels.noise import INTERPRET, NoiseRows, store_row_noise
from tpsample.backends.triton_.kernels.overlap import (
    let_next_launch_start,
    prefetch_rows,
    wait_for_previous_launch,
)


@triton.jit
def product_tile(
    hidden_ptr,
    stride_hidden_b,
    weight_ptr,
    stride_weight_v,
    row_v,
    row_b,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """weight[row_v] · hidden[row_b]^T, [BLOCK_V, BLOCK_B], accumulated in fp32.

    The interpreter accumulates in float64 and rounds once, as the PyTorch definition does. It also
    widens the tiles before the product, because its bf16 arithmetic is broken.
    """
    offs_d = tl.arange(0, BLOCK_D)
    weight = weight_ptr + row_v.to(tl.int64)[:, None] * stride_weight_v + offs_d[None, :]
    hidden = hidden_ptr + row_b.to(tl.int64)[None, :] * stride_hidden_b + offs_d[:, None]
    ACCUMULATOR: tl.constexpr = tl.float64 if INTERPRET else tl.float32
    product = tl.zeros((row_v.shape[0], row_b.shape[0]), ACCUMULATOR)
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


@triton.jit
def given_tile(logits_ptr, stride_logits_b, row_v, row_b):
    """The logits that the caller computed in place of a product, fp32 [BLOCK_V, BLOCK_B]."""
    logits = logits_ptr + row_b.to(tl.int64)[None, :] * stride_logits_b + row_v[:, None]
    return tl.load(logits).to(tl.float32)


@triton.jit(
    do_not_specialize=[*STEP_NUMBERS, "vocab_start", "vocab_stop"],
    # Read and written one row at a time; a view of them must not compile another kernel.
    do_not_specialize_on_alignment=["seed_ptr", "position_ptr", "temperature_ptr", "words_ptr"],
)
def lm_head_kernel(
    # inputs
    hidden_ptr,  # [num_rows, HIDDEN_SIZE]; without a weight the logits, [num_rows, ≥ V_local]
    stride_hidden_b,
    weight_ptr,  # [V_local, HIDDEN_SIZE], same dtype; None if the caller computed the logits
    stride_weight_v,
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    # shard: global ids [vocab_start, vocab_stop); tiles are counted from vocab_start & ~3. The two
    # lie in 8 aligned bytes: loaded by one instruction, they save up to 14 registers on sm_90.
    vocab_start,
    vocab_stop,
    first_tile,
    num_tiles,  # of the shard; pushed: at least num_chunks, so that every chunk is pushed
    # sizes
    num_rows,
    num_samples,
    # scratch, see `NoiseRows`; of all below, what is off is None
    stream_ptr,  # [4, ≥ num_samples · num_rows + BLOCK_B] int32
    stride_stream,
    scale_ptr,  # [≥ num_rows + BLOCK_B] fp32
    # outputs
    words_ptr,  # [num_samples · num_rows] int64, zero between steps; pushed: [num_chunks, max_rows]
    logits_ptr,  # [≥ num_stored, V_local] fp32, with controls then the same processed
    stride_logits_b,
    num_stored,  # rows before the processed ones
    slot_ptr,  # [num_rows] int32
    tile_first_ptr,  # [≥ num_stored, tiles] int64, words of stored rows
    tile_best_ptr,  # [≥ num_stored, num_samples, tiles] int64
    stride_words,
    # request controls of the rows, see `Controls`
    state_slot_ptr,
    wants_ptr,
    penalty_ptr,
    touched_ptr,
    history_ptr,
    token_bias_ptr,
    mask_ptr,
    draft_ptr,
    num_drafts_ptr,
    state_width,
    max_drafts,
    # peers, see `Peers`: the last program of a chunk writes its words to every rank's inbox
    arrive_ptr,
    epoch_ptr,
    lost_ptr,
    inboxes_ptr,
    num_chunks,
    rank,
    world_size,
    max_rows,
    # head
    logit_scale,
    logit_softcap,
    bias_ptr,  # [V_local]
    # the ids that can win, see `screening`; tiles are then places of the list
    listed_ptr,  # [≥ num_groups] int32
    num_listed_ptr,  # [1] int32
    # blocks
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # rows of the epilogue at a time
    BLOCK_W: tl.constexpr,  # ranks, rounded up
    OVERLAP: tl.constexpr,  # whether the kernel behind this one may be launched early
    PREFETCH: tl.constexpr,  # bytes of each row to bring near while noise is made, or 0
):
    rows = NoiseRows(num_rows, num_samples, stream_ptr, stride_stream, scale_ptr)
    shard = Shard(vocab_start, vocab_stop)
    head = HeadArguments(logit_scale, logit_softcap, bias_ptr)
    controls = Controls(
        state_slot_ptr, wants_ptr, penalty_ptr, touched_ptr, history_ptr, token_bias_ptr,
        mask_ptr, draft_ptr, num_drafts_ptr, state_width, max_drafts,
    )  # fmt: skip
    peers = Peers(
        arrive_ptr, epoch_ptr, lost_ptr, inboxes_ptr, num_chunks, rank, world_size, max_rows
    )

    # The tile. Batch tiles of one vocabulary tile are neighbours, so they share it in L2.
    num_batch_tiles = tl.cdiv(num_rows, BLOCK_B)
    pid_v = first_tile + tl.program_id(0) // num_batch_tiles
    pid_b = tl.program_id(0) % num_batch_tiles
    if listed_ptr is None:
        ids = TileIds(vocab_start // 4 * 4 + pid_v * BLOCK_V, None, None)
        has_ids = (ids.first < vocab_stop) & (vocab_start < vocab_stop)
    else:
        if OVERLAP:
            wait_for_previous_launch()
        ids = TileIds(pid_v * BLOCK_V, listed_ptr, tl.load(num_listed_ptr))
        has_ids = pid_v * BLOCK_V < ids.num_listed * GROUP
    offs_b = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    if inboxes_ptr is not None:
        chunk = chunk_of_tile(pid_v, num_tiles, num_chunks)
        words_ptr += chunk * max_rows
    outputs = Outputs(
        words_ptr, logits_ptr, stride_logits_b, slot_ptr, num_stored, pid_v, tile_first_ptr,
        tile_best_ptr, stride_words,
    )  # fmt: skip

    # A tile past the shard, or past the list, has no ids: it only counts as arrived.
    if has_ids:
        # Rows past an edge are masked after. Loads could be masked in place of it, once a GPU has
        # shown one row to take longer than 16.
        offs_v = token_ids(ids, vocab_stop, BLOCK_V)
        row_v = weight_rows(offs_v, shard)
        row_b = tl.minimum(offs_b, num_rows - 1)
        # The streams take some 2 µs, most of it waiting; the weights travel meanwhile.
        if PREFETCH > 0:
            prefetch_rows(weight_ptr + row_v.to(tl.int64) * stride_weight_v, PREFETCH)
        store_row_noise(rows, seed_ptr, position_ptr, temperature_ptr, offs_b)

        # Product.
        if weight_ptr is None:
            product = given_tile(hidden_ptr, stride_hidden_b, row_v, row_b)
        else:
            product = product_tile(
                hidden_ptr, stride_hidden_b, weight_ptr, stride_weight_v, row_v, row_b, HIDDEN_SIZE,
                BLOCK_D,
            )  # fmt: skip

        if OVERLAP:
            let_next_launch_start()

        # Epilogue: every row's best candidate of the tile, into the maximum over the rank's tiles.
        scoring = Scoring(ids, rows, shard, head, controls)
        given = weight_ptr is None
        store_candidates(product, scoring, outputs, pid_b * BLOCK_B, given, BLOCK_E)

    # Push: the words of a complete chunk, to every rank.
    if inboxes_ptr is not None:
        push_last_arrival(peers, rows, words_ptr, chunk, num_tiles, pid_b, offs_b, BLOCK_W)
