"""Hidden states as two 8-bit limbs, and their product with an 8-bit copy of the weights.

    h = unit · (256 · high + low) + what is lost      high and low are int8

Proof and plain twin: `tpsample.backends.screening.int8_copy`.
"""

import triton
import triton.language as tl

from tpsample.backends.triton_.kernels.constant import STEP_NUMBERS, Constant
from tpsample.backends.triton_.kernels.noise import NoiseRows, fma, store_row_noise
from tpsample.backends.triton_.kernels.overlap import let_next_launch_start

TINY = Constant(2.0**-100)
"""Absolute: more than 2^24 terms that were lost below 2^-126."""
UNIT_STEPS = Constant(127 * 256)
"""A hidden state is at most this many units: 256 · high + low, high from -127 to 127."""


@triton.jit(
    do_not_specialize=STEP_NUMBERS,
    do_not_specialize_on_alignment=["seed_ptr", "position_ptr", "temperature_ptr"],
)
def screening_rows_kernel(
    # inputs
    hidden_ptr,  # [num_rows, HIDDEN_SIZE]
    stride_hidden_b,
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows] fp32
    # sizes
    num_rows,
    num_samples,
    # outputs
    stream_ptr,  # see `NoiseRows`
    stride_stream,
    scale_ptr,
    limb_ptr,  # [2, max_rows, …] int8, high and low limbs
    stride_limb_half,
    stride_limb_b,
    unit_ptr,  # [num_rows] fp32, the hidden state of one low limb
    norm_ptr,  # [num_rows] fp32, ‖h‖ rounded up
    error_ptr,  # [num_rows] fp32, ‖h - ĥ‖ + ACCUMULATION · ‖h‖ rounded up
    row_lower_ptr,  # [num_samples · num_rows] fp32, set to -inf
    num_listed_ptr,  # [1] int32, set to 0
    ACCUMULATION: tl.constexpr,  # relative error of both products, in ‖w‖ ‖h‖
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEADS: tl.constexpr,  # whether the kernel behind this one may be launched early
):
    """Write one row's limbs, norms, streams and scale, and clear what the step adds to."""
    if LEADS:
        let_next_launch_start()
    row = tl.program_id(0)
    rows = NoiseRows(num_rows, num_samples, stream_ptr, stride_stream, scale_ptr)
    store_row_noise(rows, seed_ptr, position_ptr, temperature_ptr, row + tl.arange(0, 1))
    for sample in range(1 if num_samples is None else num_samples):
        tl.store(row_lower_ptr + sample * num_rows + row, float("-inf"))
    if row == 0:
        tl.store(num_listed_ptr, 0)

    hidden = hidden_ptr + row.to(tl.int64) * stride_hidden_b
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for d in range(0, HIDDEN_SIZE, BLOCK):
        h = tl.load(hidden + d + offs, mask=d + offs < HIDDEN_SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(h))
        wrong |= ((h != h) | (tl.abs(h) == float("inf"))).to(tl.int32)
    is_wrong = tl.max(wrong, axis=0) != 0
    unit = tl.maximum(tl.max(largest, axis=0) / UNIT_STEPS, TINY)
    unit = tl.where(is_wrong, 1.0, unit)

    # In units, so that no square is lost: h = unit · steps.
    squares = tl.zeros((BLOCK,), tl.float32)
    lost_squares = tl.zeros((BLOCK,), tl.float32)
    for d in range(0, HIDDEN_SIZE, BLOCK):
        h = tl.load(hidden + d + offs, mask=d + offs < HIDDEN_SIZE, other=0.0).to(tl.float32)
        steps = tl.where(is_wrong, 0.0, h / unit)
        whole = tl.floor(steps + 0.5)
        high = tl.floor((whole + 128.0) / 256.0)
        low = whole - 256.0 * high
        limb = limb_ptr + row.to(tl.int64) * stride_limb_b + d + offs
        mask = d + offs < HIDDEN_SIZE
        tl.store(limb, high.to(tl.int8), mask=mask)
        tl.store(limb + stride_limb_half, low.to(tl.int8), mask=mask)
        lost = tl.where(is_wrong, 0.0, fma(-whole, unit, h) / unit)
        squares += steps * steps
        lost_squares += lost * lost
    # The sums are off by less than one part in 2^24 per term, and everything else by a few.
    UP: tl.constexpr = 1.0 + (HIDDEN_SIZE + 64) * 2.0**-23
    norm = tl.sqrt(tl.sum(squares, axis=0)) * unit * UP + TINY
    error = tl.sqrt(tl.sum(lost_squares, axis=0)) * unit * UP + ACCUMULATION * norm + TINY
    tl.store(unit_ptr + row, unit)
    tl.store(norm_ptr + row, tl.where(is_wrong, float("inf"), norm))
    tl.store(error_ptr + row, tl.where(is_wrong, float("inf"), error * (1.0 + 2.0**-20)))


@triton.jit
def limb_product(
    limb_ptr, stride_limb_half, stride_limb_b, copy_ptr, stride_copy_v, row_v, num_rows,
    PADDED_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return copy[row_v] · (256 · high + low)^T, fp32 [BLOCK_V, BLOCK_B]; both sums are exact.

    The halves lie side by side on the batch axis, so that the copy is read once.
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_l = tl.arange(0, 2 * BLOCK_B)
    row_b = tl.minimum(offs_l % BLOCK_B, num_rows - 1)
    copy = copy_ptr + row_v.to(tl.int64)[:, None] * stride_copy_v + offs_d[None, :]
    limb = limb_ptr + (offs_l // BLOCK_B * stride_limb_half + row_b * stride_limb_b)[None, :]
    limb += offs_d[:, None]
    product = tl.zeros((row_v.shape[0], 2 * BLOCK_B), tl.int32)
    for d in range(0, PADDED_SIZE, BLOCK_D):
        product = tl.dot(tl.load(copy + d), tl.load(limb + d), product, out_dtype=tl.int32)
    high, low = product.reshape((row_v.shape[0], 2, BLOCK_B)).permute((0, 2, 1)).split()
    return high.to(tl.float32) * 256.0 + low.to(tl.float32)
