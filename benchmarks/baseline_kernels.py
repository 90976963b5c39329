"""Triton kernels of the comparison: a Gumbel argmax over stored logits, reads, and nothing."""

import triton
import triton.language as tl

from tpsample.kernels.epilogue import best_word
from tpsample.kernels.noise import fma, noise_tile
from tpsample.kernels.overlap import let_next_launch_start, wait_for_previous_launch

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
    noise = noise_tile(first_id // 4 + tl.arange(0, BLOCK_V // 4), r0, r1, r2, ROUNDS)
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


@triton.jit
def reread_kernel(
    x_ptr,  # [num_words] int32, a whole number of blocks per program
    sums_ptr,  # [programs] int64
    num_words,
    times,
    BLOCK: tl.constexpr,
):
    """Sum every word `times` times: what stays in L2 is read from there.

    In every pass a program reads another part, and no load stays in L1.
    """
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0) * BLOCK
    for again in range(times):
        first = (tl.program_id(0) + again) % tl.num_programs(0) * BLOCK
        for start in tl.range(first, num_words, step, loop_unroll_factor=4):
            total += tl.load(x_ptr + start + offs, cache_modifier=".cg")
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total.to(tl.int64), axis=0))


@triton.jit
def tile_read_kernel(
    x_ptr,  # [num_rows, WIDTH] int32
    stride_x,
    sums_ptr,  # [tiles] int64
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum the words of one tile of rows, piece by piece as the LM head loads it, with no product.

    Rows past the last are the last one again, which the sum leaves out.
    """
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_d = tl.arange(0, BLOCK_D)
    row_v = tl.minimum(offs_v, num_rows - 1).to(tl.int64)
    x = x_ptr + row_v[:, None] * stride_x + offs_d[None, :]
    total = tl.zeros((BLOCK_V, BLOCK_D), tl.int32)
    for start in tl.range(0, WIDTH, BLOCK_D, num_stages=STAGES):
        if WIDTH % BLOCK_D == 0:
            total += tl.load(x + start)
        else:
            total += tl.load(x + start, mask=(start + offs_d < WIDTH)[None, :], other=0)
    total = tl.where((offs_v < num_rows)[:, None], total, 0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total.to(tl.int64)))


@triton.jit
def empty_kernel(
    x_ptr,  # [1] int32
    OVERLAP: tl.constexpr,  # whether it may be launched before the kernel ahead of it has ended
):
    """Write one number: what any launch takes."""
    if OVERLAP:
        let_next_launch_start()
        wait_for_previous_launch()
    tl.store(x_ptr, 1)
