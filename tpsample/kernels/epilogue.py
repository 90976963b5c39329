"""What happens to a logits tile while it is on chip: head, request controls, score, best candidate,
word, maximum."""

import triton
import triton.language as tl

from tpsample.core import word
from tpsample.kernels.controls import control_tile
from tpsample.kernels.noise import fma, noise_tile

TOKEN_BITS = tl.constexpr(word.TOKEN_BITS)
TOKEN_MASK = tl.constexpr(word.TOKEN_MASK)
KEY_NAN = tl.constexpr(word.KEY_NAN)


@triton.jit
def head_tile(
    product,
    bias_v,
    logit_scale,
    logit_softcap,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Accumulated product to logit: scale, soft-cap, bias, in this order."""
    logits_tile = product
    if HAS_SCALE:
        logits_tile = logits_tile * logit_scale
    if HAS_SOFTCAP:
        ratio = logits_tile / logit_softcap
        if INTERPRET:
            ratio = ratio.to(tl.float64)
        # tanh x = 1 - 2 / (e^2x + 1): no cancellation that matters beside the rounding of a logit
        logits_tile = (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0)).to(tl.float32) * logit_softcap
    if HAS_BIAS:
        logits_tile = logits_tile + bias_v[:, None]
    return logits_tile


@triton.jit
def score_tile(
    logits_tile,
    first_id,
    stream_ptr,
    stride_stream,
    scale,
    offs_slot,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROUNDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """fma(logit, log2 e / T, -L); a greedy row has scale 1 and gain 0 in place of -1."""
    stream = stream_ptr + offs_slot
    r0 = tl.load(stream).to(tl.uint32, bitcast=True)
    r1 = tl.load(stream + stride_stream).to(tl.uint32, bitcast=True)
    r2 = tl.load(stream + 2 * stride_stream).to(tl.uint32, bitcast=True)
    gain = tl.load(stream + 3 * stride_stream).to(tl.float32, bitcast=True)
    noise = noise_tile(first_id, r0, r1, r2, BLOCK_V, BLOCK_B, ROUNDS, INTERPRET)
    return fma(logits_tile, scale[None, :], noise * gain[None, :], INTERPRET)


@triton.jit
def store_logits(
    logits_tile,
    logits_ptr,  # [≥ first_slot + stored rows, V_local] fp32
    stride_logits_b,
    slot_ptr,  # [num_rows] int32, the place of each row among the stored ones, or -1
    first_slot,
    offs_b,
    num_rows,
    offs_v,
    vocab_start,
    vocab_stop,
):
    """Leave the tile's logits of stored rows in memory; they never leave the rank."""
    slot = tl.load(slot_ptr + offs_b, mask=offs_b < num_rows, other=-1)
    mask_v = (offs_v >= vocab_start) & (offs_v < vocab_stop)
    column = (offs_v - vocab_start)[:, None]
    address = logits_ptr + (first_slot + slot).to(tl.int64)[None, :] * stride_logits_b + column
    tl.store(address, logits_tile, mask=mask_v[:, None] & (slot >= 0)[None, :])


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(values, axis: tl.constexpr, INTERPRET: tl.constexpr):
    """The maximum along an axis; NaN if there is one.

    The interpreter runs a custom reduction element by element, so there NaN is looked for
    separately.
    """
    if INTERPRET:
        is_nan = tl.max((values != values).to(tl.int32), axis=axis) > 0
        best = tl.where(is_nan, float("nan"), tl.max(values, axis=axis))
    else:
        best = tl.reduce(values, axis, _nan_max)
    return best


@triton.jit
def best_word(score_tile, offs_v, INTERPRET: tl.constexpr):
    """Word of the best candidate of each column, ties to the lowest id; a NaN wins its column.

    Two passes (maximum, then lowest id that has it) cost 3 instructions per logit less than one
    reduction over (score, id) pairs.
    """
    best = max_or_nan(score_tile, 0, INTERPRET)
    holds_best = score_tile == best[None, :]
    token_id = tl.min(tl.where(holds_best, offs_v[:, None], TOKEN_MASK), axis=0)
    # After a reduction every thread holds several columns that others hold too. Gathering them in
    # order leaves one per thread, so that packing and the atomic are done once.
    columns = tl.arange(0, score_tile.shape[1])
    return pack(tl.gather(best, columns, 0), tl.gather(token_id, columns, 0))


@triton.jit
def pack(score, token_id):
    """(fp32 score, int32 id) to an int64 word of epoch 0; layout and example in `tpsample.core.word`."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    key = tl.where(score != score, KEY_NAN, ordered.to(tl.int64))
    return (key << TOKEN_BITS) | (token_id ^ TOKEN_MASK).to(tl.int64)


@triton.jit
def store_candidates(
    product,
    first_row,
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
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Product of BLOCK_V ids and BLOCK_B rows to the maxima in `words_ptr`, BLOCK_E rows at a time.

    Rows are columns of the accumulator, whose halves are taken until BLOCK_E are left: the noise
    then needs registers for BLOCK_E columns, not BLOCK_B, and a 128 × 256 tile (128 accumulators
    per thread) does not spill.
    """
    if BLOCK_B > BLOCK_E:
        HALF: tl.constexpr = BLOCK_B // 2
        left, right = product.reshape((BLOCK_V, 2, HALF)).permute((0, 2, 1)).split()
        store_candidates(
            left, first_row, first_id, vocab_start, vocab_stop, bias_ptr, stream_ptr, stride_stream,
            scale_ptr, slot_ptr, logits_ptr, stride_logits_b, num_stored, controls, words_ptr,
            num_rows, num_samples, logit_scale, logit_softcap, HAS_SCALE, HAS_SOFTCAP, HAS_BIAS,
            STORE_LOGITS, MASKS, BIASES, PENALTIES, DRAFTS, MANY_SAMPLES, ROUNDS, INTERPRET,
            BLOCK_V, HALF, BLOCK_E,
        )  # fmt: skip
        # Rows past the last draw no noise.
        if first_row + HALF < num_rows:
            store_candidates(
                right, first_row + HALF, first_id, vocab_start, vocab_stop, bias_ptr, stream_ptr,
                stride_stream, scale_ptr, slot_ptr, logits_ptr, stride_logits_b, num_stored,
                controls, words_ptr, num_rows, num_samples, logit_scale, logit_softcap, HAS_SCALE,
                HAS_SOFTCAP, HAS_BIAS, STORE_LOGITS, MASKS, BIASES, PENALTIES, DRAFTS,
                MANY_SAMPLES, ROUNDS, INTERPRET, BLOCK_V, HALF, BLOCK_E,
            )  # fmt: skip
    else:
        offs_v = first_id + tl.arange(0, BLOCK_V)
        offs_b = first_row + tl.arange(0, BLOCK_B)
        bias_v = 0.0
        if HAS_BIAS:
            row_v = tl.minimum(tl.maximum(offs_v, vocab_start), vocab_stop - 1) - vocab_start
            bias_v = tl.load(bias_ptr + row_v).to(tl.float32)
        logits_tile = head_tile(
            product, bias_v, logit_scale, logit_softcap, HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, INTERPRET
        )
        if (first_id < vocab_start) | (first_id + BLOCK_V > vocab_stop):
            mask_v = (offs_v >= vocab_start) & (offs_v < vocab_stop)
            logits_tile = tl.where(mask_v[:, None], logits_tile, float("-inf"))
        if STORE_LOGITS:
            store_logits(
                logits_tile, logits_ptr, stride_logits_b, slot_ptr, 0, offs_b, num_rows, offs_v,
                vocab_start, vocab_stop,
            )  # fmt: skip

        if MASKS or BIASES or PENALTIES:
            logits_tile = control_tile(
                logits_tile, first_id, vocab_start, offs_b, num_rows, controls, MASKS, BIASES,
                PENALTIES, DRAFTS, BLOCK_V,
            )  # fmt: skip
            if STORE_LOGITS:
                store_logits(
                    logits_tile, logits_ptr, stride_logits_b, slot_ptr, num_stored, offs_b,
                    num_rows, offs_v, vocab_start, vocab_stop,
                )  # fmt: skip

        scale = tl.load(scale_ptr + offs_b)
        for sample in range(num_samples if MANY_SAMPLES else 1):
            offs_slot = sample * num_rows + offs_b
            scores = score_tile(
                logits_tile, first_id, stream_ptr, stride_stream, scale, offs_slot, BLOCK_V,
                BLOCK_B, ROUNDS, INTERPRET,
            )  # fmt: skip
            word = best_word(scores, offs_v, INTERPRET)
            tl.atomic_max(
                words_ptr + offs_slot, word, mask=offs_b < num_rows, sem="relaxed", scope="gpu"
            )
