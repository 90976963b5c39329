"""Triton kernels of the comparison: a Gumbel argmax over stored logits, and a plain read."""

import triton
import triton.language as tl

from tpsample.kernels.epilogue import best_word
from tpsample.kernels.noise import fma, noise_tile

ROUNDS = 10


@triton.jit
def gumbel_argmax_kernel(
    # inputs
    logits_ptr,  # [B, V]
    stride_logits_b,
    stream_ptr,  # [B, 3] int32, the row streams of `tpsample.noise`
    scale_ptr,  # [B] fp32, log2 e / T
    # output
    words_ptr,  # [B] int64, zeroed before
    # sizes
    vocab_size,
    ROUNDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Which part of which row.
    row = tl.program_id(1)
    first_id = tl.program_id(0) * BLOCK_V
    offs_v = first_id + tl.arange(0, BLOCK_V)
    offs_b = row + tl.arange(0, 1)

    # Score: the sampler's own noise, so that only the fusion differs.
    logits = logits_ptr + row.to(tl.int64) * stride_logits_b + offs_v
    logits_v = tl.load(logits, mask=offs_v < vocab_size, other=float("-inf")).to(tl.float32)
    r0 = tl.load(stream_ptr + offs_b * 3 + 0).to(tl.uint32, bitcast=True)
    r1 = tl.load(stream_ptr + offs_b * 3 + 1).to(tl.uint32, bitcast=True)
    r2 = tl.load(stream_ptr + offs_b * 3 + 2).to(tl.uint32, bitcast=True)
    noise = noise_tile(first_id, r0, r1, r2, BLOCK_V, ROUNDS)
    scale = tl.load(scale_ptr + offs_b)
    scores = fma(logits_v[:, None], scale[None, :], -noise)

    # Store: the maximum over the row's parts.
    word = best_word(scores, offs_v)
    tl.atomic_max(words_ptr + offs_b, word, sem="relaxed", scope="gpu")


@triton.jit
def read_kernel(
    x_ptr,  # [num_words] int32
    sums_ptr,  # [programs] int64
    num_words,
    BLOCK: tl.constexpr,
):
    """Sum every 32-bit word, modulo 2^32: the fewest bytes a sampler must move, and no more."""
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(first, num_words, step, loop_unroll_factor=4):
        total += tl.load(x_ptr + start + offs, mask=start + offs < num_words, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total.to(tl.int64), axis=0))
