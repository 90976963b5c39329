"""Before the matmul: row streams and scales of the step, candidate words cleared."""

import triton
import triton.language as tl

from tpsample import params
from tpsample.kernels.noise import DOMAIN_TOKEN, philox4x32

GREEDY_BELOW = tl.constexpr(params.GREEDY_BELOW)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def low_high(x):
    """The two 32-bit halves of an int64 as uint32."""
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_chunks"])
def row_noise_kernel(
    # inputs
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    # outputs
    stream_ptr,  # [4, ≥ num_slots] int32: three stream words, gain as fp32; slot = sample, row
    stride_stream,
    scale_ptr,  # [num_rows] fp32
    words_ptr,  # [num_chunks, …] int64, zeroed in the first num_slots
    stride_words_c,
    # sizes
    num_rows,
    num_slots,
    num_chunks,
    INTERPRET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs_slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_slot < num_slots
    row = offs_slot % num_rows
    sample = offs_slot // num_rows

    seed_low, seed_high = low_high(tl.load(seed_ptr + row, mask=mask, other=0))
    position_low, position_high = low_high(tl.load(position_ptr + row, mask=mask, other=0))
    domain = tl.full((BLOCK,), DOMAIN_TOKEN, tl.uint32)
    r0, r1, r2, _ = philox4x32(
        position_low,
        position_high,
        sample.to(tl.uint32),
        domain,
        seed_low,
        seed_high,
        10,
        INTERPRET,
    )

    temperature = tl.load(temperature_ptr + row, mask=mask, other=1.0)
    random = temperature >= GREEDY_BELOW
    safe = tl.where(random, temperature, 1.0).to(tl.float64)
    scale = tl.where(random, (tl.full((BLOCK,), LOG2_E, tl.float64) / safe).to(tl.float32), 1.0)

    gain = tl.where(random, -1.0, 0.0)
    stream = stream_ptr + offs_slot
    tl.store(stream, r0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(stream + stride_stream, r1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(stream + 2 * stride_stream, r2.to(tl.int32, bitcast=True), mask=mask)
    tl.store(stream + 3 * stride_stream, gain.to(tl.int32, bitcast=True), mask=mask)
    tl.store(scale_ptr + offs_slot, scale, mask=offs_slot < num_rows)
    for chunk in range(num_chunks):
        words = words_ptr + chunk * stride_words_c.to(tl.int64) + offs_slot
        tl.store(words, tl.zeros((BLOCK,), tl.int64), mask=mask)
