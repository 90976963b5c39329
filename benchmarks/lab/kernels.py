"""Triton kernels of the comparison: reads, a greedy LM head, and noise by itself."""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.lm_head import product_tile
from tpsample.backends.triton_.kernels.noise import (
    NoiseRows,
    log2_exponential,
    low_base,
    store_row_noise,
)
from tpsample.backends.triton_.kernels.overlap import (
    let_next_launch_start,
    wait_for_previous_launch,
)


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
    rows = NoiseRows(num_rows, None, stream_ptr, stride_stream, scale_ptr)
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
    """A plain greedy LM head: the cost of the epilogue is counted against it.

    The same product, then what one writes first: mask every tile, one (value, index) reduction,
    store both. It makes the streams and scales of its rows too, whose cost goes with rows, not with
    logits: that is counted alone, as `row_noise_kernel`.
    """
    num_batch_tiles = tl.cdiv(num_rows, BLOCK_B)
    first_id = vocab_start // 4 * 4 + tl.program_id(0) // num_batch_tiles * BLOCK_V
    offs_v = first_id + tl.arange(0, BLOCK_V)
    offs_b = tl.program_id(0) % num_batch_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    row_v = tl.minimum(tl.maximum(offs_v, vocab_start), vocab_stop - 1) - vocab_start
    row_b = tl.minimum(offs_b, num_rows - 1)
    rows = NoiseRows(num_rows, None, stream_ptr, stride_stream, scale_ptr)
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


@triton.jit
def noise_kernel(
    word_ptr,  # [num_words] int64, 32 bits each: the sampler's noise of chosen words
    low_ptr,  # [num_words] int64, the 16 low bits that the quad's XOR would give
    value_ptr,  # [num_words] fp32: L
    num_words,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_words
    word = tl.load(word_ptr + offs, mask=mask, other=1).to(tl.uint32)
    low = tl.load(low_ptr + offs, mask=mask, other=0).to(tl.uint32)
    none = word ^ word
    base = low_base(word, low, none, none)
    tl.store(value_ptr + offs, log2_exponential(word, base), mask=mask)
