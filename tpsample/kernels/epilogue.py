"""What happens to a logits tile while it is on chip: head, score, best candidate, word."""

import triton
import triton.language as tl

from tpsample import word
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
    scale,
    offs_slot,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROUNDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """fma(logit, log2 e / T, -L); a greedy row has scale 1 and no noise."""
    r0 = tl.load(stream_ptr + offs_slot * 4 + 0).to(tl.uint32, bitcast=True)
    r1 = tl.load(stream_ptr + offs_slot * 4 + 1).to(tl.uint32, bitcast=True)
    r2 = tl.load(stream_ptr + offs_slot * 4 + 2).to(tl.uint32, bitcast=True)
    random = tl.load(stream_ptr + offs_slot * 4 + 3) != 0
    noise = noise_tile(first_id, r0, r1, r2, BLOCK_V, BLOCK_B, ROUNDS, INTERPRET)
    return fma(logits_tile, scale[None, :], tl.where(random[None, :], -noise, 0.0), INTERPRET)


@triton.jit
def store_logits(
    logits_tile,
    logits_ptr,  # [stored rows, V_local] fp32
    stride_logits_b,
    slot_ptr,  # [num_rows] int32, the place of each row among the stored ones, or -1
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
    address = logits_ptr + slot.to(tl.int64)[None, :] * stride_logits_b + column
    tl.store(address, logits_tile, mask=mask_v[:, None] & (slot >= 0)[None, :])


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_word(score_tile, offs_v, INTERPRET: tl.constexpr):
    """Word of the best candidate of each column, ties to the lowest id; a NaN wins its column.

    Two passes (maximum, then lowest id that has it) cost 3 instructions per logit less than one
    reduction over (score, id) pairs. The interpreter runs a custom reduction element by element,
    so there NaN is looked for separately.
    """
    if INTERPRET:
        is_nan = tl.max((score_tile != score_tile).to(tl.int32), axis=0) > 0
        best = tl.where(is_nan, float("nan"), tl.max(score_tile, axis=0))
    else:
        best = tl.reduce(score_tile, 0, _nan_max)
    holds_best = score_tile == best[None, :]
    token_id = tl.min(tl.where(holds_best, offs_v[:, None], TOKEN_MASK), axis=0)
    return pack(best, token_id)


@triton.jit
def pack(score, token_id):
    """(fp32 score, int32 id) to an int64 word of epoch 0; layout and example in `tpsample.word`."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    key = tl.where(score != score, KEY_NAN, ordered.to(tl.int64))
    return (key << TOKEN_BITS) | (token_id ^ TOKEN_MASK).to(tl.int64)
