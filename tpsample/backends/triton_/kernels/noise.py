"""Philox words, the noise of a [BLOCK_V, BLOCK_B] tile, and the per-row part of a score.

Twins: `tpsample.noise`, and for scale and streams of a row `tpsample.core.row_noise`.

The interpreter has no inline assembly and rounds an fma twice. There the noise is computed in
float64, which gives the bits of the plain PyTorch definition. On AMD's GPUs, whose assembly is
another one, the same formula is written in Triton.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tpsample import noise
from tpsample.backends.triton_.kernels import interpreter
from tpsample.backends.triton_.kernels.constant import Constant
from tpsample.core import masses, row_noise
from tpsample.core.machine import interpreted

if interpreted():
    interpreter.repair()
INTERPRET = Constant(interpreted())
ROUNDS = Constant(noise.ROUNDS)
DOMAIN_TOKEN = Constant(noise.DOMAIN_TOKEN)
KEY0 = Constant(noise.ELEMENT_KEY[0])
KEY1 = Constant(noise.ELEMENT_KEY[1])
U_SCALE = Constant(noise.U_SCALE)
LOW_OFFSET = Constant(2.0**-25 - noise.LOW_HALF)
POLYNOMIAL = Constant(tuple(noise.POLYNOMIAL))
DEGREE = Constant(len(noise.POLYNOMIAL) - 1)


@triton.jit
def fma(a, b, c):
    """a · b + c in fp32 with one rounding; b and c may be fp32 constants."""
    if INTERPRET:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def log2_of_tail_or(u, head):
    """log2(e), where e is `head` below u = 1/4 and -log2(1 - u) above.

    MUFU.LG2 has an absolute error of 2^-22 on [1/2, 2] and of 2 ulp elsewhere. One block of
    assembly keeps each predicate next to its use. Apart, the assembler packs the predicates of a
    whole tile into a register and unpacks them again, which is 4 more instructions per logit. The
    tail's sign goes with |e|.

    On AMD's GPUs `tl.log2` is OCML's, of at most 3 ulp everywhere. |L| < 49, so that L is off by no
    more than 1.2e-5, and the bound of the noise between devices, 4e-5, holds.
    """
    if INTERPRET:
        tail = -tl.log2((1.0 - u).to(tl.float64)).to(tl.float32)
        return tl.log2(tl.where(u < 0.25, head, tail).to(tl.float64)).to(tl.float32)
    elif is_hip():
        return tl.log2(tl.where(u < 0.25, head, -tl.log2(1.0 - u)))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred is_tail;
            .reg .f32 e, v;
            setp.ge.f32 is_tail, $1, 0f3E800000;
            sub.rn.f32 v, 0f3F800000, $1;
            mov.f32 e, $2;
            @is_tail lg2.approx.ftz.f32 e, v;
            abs.f32 e, e;
            lg2.approx.ftz.f32 $0, e;
            }""",
            "=r,r,r",
            [u, head],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def wide_product(a, b: tl.constexpr):
    """Upper and lower 32 bits of a · b, uint32: one instruction, where umulhi and mul are two."""
    if INTERPRET or is_hip():
        return tl.umulhi(a, b), tl.mul(a, b, sanitize_overflow=False)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b64 product;
            mul.wide.u32 product, $2, $3;
            mov.b64 {$1, $0}, product;
            }""",
            "=r,=r,r,r",
            [a, tl.full((1,), b, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32 on uint32 tensors of one shape."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = wide_product(c0, 0xD2511F53)
        high1, low1 = wide_product(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def low_base(w0, w1, w2, w3):
    """The part of `low` that the four words of a quad share: their XOR, below the exponent of
    2^-25."""
    return ((w0 ^ w1 ^ w2 ^ w3) & 0xFFFF) | 0x33000000


@triton.jit
def log2_exponential(word, base):
    """L = log2(e) of one token, from its word and its quad's `low_base`.

    The 16 bits of `low` are put into the mantissa of 2^-25, which saves a conversion from integer.
    Subtracting 2^-25 - 2^-49 afterwards is exact.
    """
    low = (base ^ (word & 0xFFFF)).to(tl.float32, bitcast=True) - LOW_OFFSET
    u = fma(word.to(tl.float32), U_SCALE, low)
    p = fma(u, POLYNOMIAL[DEGREE], POLYNOMIAL[DEGREE - 1])
    for power in tl.static_range(DEGREE - 2, -1, -1):
        p = fma(p, u, POLYNOMIAL[power])
    return log2_of_tail_or(u, u * p)


@triton.jit
def noise_tile(quads, r0, r1, r2):
    """L of the ids of some quads, int32 [N], for the rows of r0, r1 and r2, uint32 [BLOCK_B].

    The result is fp32 [4 N, BLOCK_B]. One Philox call gives the words of four ids, which are
    consecutive along the first axis: row 4 q + k of the tile takes word k of quad q.
    """
    BLOCK_B: tl.constexpr = r0.shape[0]
    BLOCK_V: tl.constexpr = 4 * quads.shape[0]
    zero = tl.zeros((BLOCK_V // 4, BLOCK_B), tl.uint32)
    quad = quads.to(tl.uint32)[:, None] + zero
    k0 = tl.full((1, 1), KEY0, tl.uint32)
    k1 = tl.full((1, 1), KEY1, tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        quad, r0[None, :] + zero, r1[None, :] + zero, r2[None, :] + zero, k0, k1
    )
    base = low_base(w0, w1, w2, w3)
    l0 = log2_exponential(w0, base)
    l1 = log2_exponential(w1, base)
    l2 = log2_exponential(w2, base)
    l3 = log2_exponential(w3, base)
    joined = tl.join(tl.join(l0, l2), tl.join(l1, l3))  # [quad, row, k >> 1, k & 1]
    return joined.permute((0, 2, 3, 1)).reshape((BLOCK_V, BLOCK_B))


GREEDY_BELOW, HOTTEST = map(Constant, (row_noise.GREEDY_BELOW, row_noise.HOTTEST))
LOG2_E_HIGH = Constant(masses.LOG2_E)
LOG2_E_LOW = Constant(row_noise.LOG2_E - masses.LOG2_E)
LN2 = Constant(masses.LN2_HIGH)


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
def safe_temperature(temperature):
    """Returns temperatures with 1 for greedy rows. Twin: `tpsample.core.row_noise`."""
    return tl.where(temperature >= GREEDY_BELOW, tl.minimum(temperature, HOTTEST), 1.0)


@triton.jit
def row_scale(temperature):
    """Returns log2 e / T in fp32 (1 for greedy rows) and the gain of the noise (-1, or 0).

    A quotient of fp32 is corrected by what it leaves. For every T that is the quotient of float64,
    rounded to fp32.
    """
    random = temperature >= GREEDY_BELOW
    safe = safe_temperature(temperature)
    quotient = tl.div_rn(tl.full(temperature.shape, LOG2_E_HIGH, tl.float32), safe)
    left = fma(-quotient, safe, LOG2_E_HIGH) + LOG2_E_LOW
    scale = fma(left, quotient * LN2, quotient)
    return tl.where(random, scale, 1.0), tl.where(random, -1.0, 0.0)


@triton.jit
def row_stream(seed, position, sample, DOMAIN: tl.constexpr = DOMAIN_TOKEN):
    """Returns the three words, uint32, that seed the noise of one sample of a block of rows.

    A sample is one number, or one per row.
    """
    seed_low, seed_high = low_high(seed)
    position_low, position_high = low_high(position)
    number = (tl.zeros(seed.shape, tl.int32) + sample).to(tl.uint32)
    domain = tl.full(seed.shape, DOMAIN, tl.uint32)
    r0, r1, r2, _ = philox4x32(position_low, position_high, number, domain, seed_low, seed_high)
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
