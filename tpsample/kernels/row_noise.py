"""The per-row part of a score: its scale and its random streams.

Twin: `tpsample.core.row_noise`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tpsample.core import row_noise
from tpsample.kernels.noise import DOMAIN_TOKEN, philox4x32

GREEDY_BELOW = tl.constexpr(row_noise.GREEDY_BELOW)
LOG2_E = tl.constexpr(1.4426950408889634)


class NoiseRows(NamedTuple):
    """The rows of a batch, and the memory in which a launch keeps their streams and scales."""

    num_rows: tl.tensor
    num_samples: tl.tensor | None  # None is one sample per row, without a loop
    stream_ptr: tl.tensor  # [4, …] int32: three stream words and the gain; at sample, row
    stride_stream: tl.tensor
    scale_ptr: tl.tensor  # [num_rows, …] fp32, log2 e / T


@triton.jit
def low_high(x):
    """The two 32-bit halves of an int64, as uint32."""
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def row_scale(temperature):
    """Returns log2 e / T in fp32 (1 for greedy rows) and the gain of the noise (-1, or 0)."""
    random = temperature >= GREEDY_BELOW
    safe = tl.where(random, temperature, 1.0).to(tl.float64)
    log2_e = tl.full(temperature.shape, LOG2_E, tl.float64)
    return tl.where(random, (log2_e / safe).to(tl.float32), 1.0), tl.where(random, -1.0, 0.0)


@triton.jit
def row_stream(seed, position, sample):
    """Returns the three words, uint32, that seed the noise of one sample of a block of rows."""
    seed_low, seed_high = low_high(seed)
    position_low, position_high = low_high(position)
    number = tl.full(seed.shape, sample, tl.int32).to(tl.uint32)
    domain = tl.full(seed.shape, DOMAIN_TOKEN, tl.uint32)
    r0, r1, r2, _ = philox4x32(position_low, position_high, number, domain, seed_low, seed_high, 10)
    return r0, r1, r2


@triton.jit
def store_row_noise(
    rows,
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    offs_b,
):
    """Write the streams and scales of this program's rows to memory, where its epilogue loads them.

    Every program of a batch tile computes them for itself, at one Philox call per row, which saves
    a launch before the matmul. All of them write the same values, and a program reads its own back
    after the barrier. In registers they would be alive during the product and make it spill.
    """
    mask_b = offs_b < rows.num_rows
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    scale, gain = row_scale(temperature)
    tl.store(rows.scale_ptr + offs_b, scale, mask=mask_b)

    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    for sample in range(1 if rows.num_samples is None else rows.num_samples):
        r0, r1, r2 = row_stream(seed, position, sample)
        stream = rows.stream_ptr + sample * rows.num_rows + offs_b
        tl.store(stream, r0.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + rows.stride_stream, r1.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + 2 * rows.stride_stream, r2.to(tl.int32, bitcast=True), mask=mask_b)
        tl.store(stream + 3 * rows.stride_stream, gain.to(tl.int32, bitcast=True), mask=mask_b)
    tl.debug_barrier()
