"""What every row needs before its logits are scored: its stream and its scale."""

import triton
import triton.language as tl

from tpsample.core import row_noise
from tpsample.kernels.noise import DOMAIN_TOKEN, philox4x32

GREEDY_BELOW = tl.constexpr(row_noise.GREEDY_BELOW)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def low_high(x):
    """The two 32-bit halves of an int64 as uint32."""
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def row_scale(temperature):
    """(fp32 log2 e / T, 1 for greedy rows; gain of the noise, -1 or 0), of a block of rows."""
    random = temperature >= GREEDY_BELOW
    safe = tl.where(random, temperature, 1.0).to(tl.float64)
    log2_e = tl.full(temperature.shape, LOG2_E, tl.float64)
    return tl.where(random, (log2_e / safe).to(tl.float32), 1.0), tl.where(random, -1.0, 0.0)


@triton.jit
def row_stream(seed, position, sample, INTERPRET: tl.constexpr):
    """The three words, uint32, that the noise of a sample of a block of rows needs."""
    seed_low, seed_high = low_high(seed)
    position_low, position_high = low_high(position)
    number = tl.full(seed.shape, sample, tl.int32).to(tl.uint32)
    domain = tl.full(seed.shape, DOMAIN_TOKEN, tl.uint32)
    r0, r1, r2, _ = philox4x32(
        position_low, position_high, number, domain, seed_low, seed_high, 10, INTERPRET
    )
    return r0, r1, r2


@triton.jit
def store_row_noise(
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    stream_ptr,  # out: [4, …] int32: three stream words, gain as fp32; slot = sample, row
    stride_stream,
    scale_ptr,  # out: [num_rows] fp32, log2 e / T
    offs_b,
    num_rows,
    num_samples,
    MANY_SAMPLES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Streams and scales of this program's rows, in memory for its epilogue to load.

    Every program of a batch tile makes them for itself, at one Philox call per row, which saves a
    launch before the matmul. All write the same values, and a program reads back its own behind
    the barrier. Kept in registers they would be alive during the product and make it spill.
    """
    mask_b = offs_b < num_rows
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    scale, gain = row_scale(temperature)
    tl.store(scale_ptr + offs_b, scale, mask=mask_b)

    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    for sample in range(num_samples if MANY_SAMPLES else 1):
        r0, r1, r2 = row_stream(seed, position, sample, INTERPRET)
        stream = stream_ptr + sample * num_rows + offs_b
        tl.store(stream, r0.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + stride_stream, r1.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + 2 * stride_stream, r2.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + 3 * stride_stream, gain.to(tl.int32, bitcast=True), mask=mask_b)
    tl.debug_barrier()
