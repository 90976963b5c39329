"""Noise: bounded for 64 neighbouring ids at a time, exact for single ids. Twin: `tpsample.noise`.

With f = fp32(w) of an id's word w, the definition has

    u >= f 2^-32 (1 − 2^-23)                 `low` is positive, and rounding is monotone
    e >= u log2 e (1 − 2e-6)                 −log2(1 − u) >= u log2 e; 2e-6 covers the polynomial
    −L <= 32 − log2 f − log2 log2 e + 1e-5   and the roundings of e and of L

The bits of a normal fp32 number f >= 1, read as an integer, bound its logarithm. log2 is concave,
so it lies above the line through neighbouring powers of two:

    log2 f >= bits(f) 2^-23 − 127            at most 0.087 below; equal at powers of two

    −L <= NOISE_TOP − bits(f) 2^-23

f = 0 has bits 0, and the bound is then 158.5, more than any noise (48.5). No logarithm is computed,
so nothing depends on the accuracy of a library.

An upper end of a score is summed in fp32. 2^-20 of the scaled logit and ROUNDING are more than its
roundings and that of the score.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample import noise as definition
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.compiling import F32, F64, FUSED, I32, I64, U32, U64, jit
from tpsample.backends.numba_.kernels.head import up
from tpsample.backends.numba_.kernels.inputs import BLOCK, leave_out
from tpsample.backends.numba_.kernels.numbers import of_ordered, ordered
from tpsample.backends.numba_.kernels.primitives import bits_as, larger, smaller
from tpsample.core.row_noise import GREEDY_BELOW, HOTTEST, LOG2_E, RowNoise

NOISE_TOP = F32(np.nextafter(F32(159.0 - math.log2(math.log2(math.e)) + 1e-5), F32(np.inf)))
BITS_SCALE = F32(2.0**-23)
ROUNDING = F32(2.0**-11)

KEY_0, KEY_1 = (U32(key) for key in definition.ELEMENT_KEY)
ROUNDS = definition.ROUNDS
U_SCALE, LOW_SCALE = definition.U_SCALE, definition.LOW_SCALE
LOW_HALF = definition.LOW_HALF
P0, P1, P2, P3, P4 = definition.POLYNOMIAL


class Draws(NamedTuple):
    """The values that the noise of a step's rows depends on.

    Attributes:
        temperature: fp32 [B].
        seed, position: int64 [B].
        samples: draws per row.
        first_sample, domain: words of the counter of the first draw's streams.
    """

    temperature: np.ndarray
    seed: np.ndarray
    position: np.ndarray
    samples: int
    first_sample: int = 0
    domain: int = definition.DOMAIN_TOKEN


class Noise(NamedTuple):
    """The values that the scores of some rows need, beside logits.

    Attributes:
        scale: fp32 [R], log2 e / T, 1 in a greedy row.
        random: fp32 [R], 1, or 0 in a greedy row.
        streams: uint32 [R, samples, 3].
    """

    scale: np.ndarray
    random: np.ndarray
    streams: np.ndarray


class Stream(NamedTuple):
    """The noise of one row and sample: numbers alone, which a call passes fast."""

    scale: np.float32
    random: np.float32
    r0: np.uint32
    r1: np.uint32
    r2: np.uint32


def draws_of(noise: RowNoise) -> Draws:
    """Return what the kernels take of the noise of a step's rows."""
    tensors = noise.temperature, noise.seed, noise.positions
    arrays = (array_of(tensor.contiguous()) for tensor in tensors)
    return Draws(*arrays, noise.num_samples)


@jit()
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32."""
    for _ in range(ROUNDS):
        p0, p1 = U64(c0) * U64(0xD2511F53), U64(c2) * U64(0xCD9E8D57)
        c0, c1 = U32(U32(p1 >> U64(32)) ^ c1 ^ k0), U32(p1)
        c2, c3 = U32(U32(p0 >> U64(32)) ^ c3 ^ k1), U32(p0)
        k0, k1 = U32(k0 + U32(0x9E3779B9)), U32(k1 + U32(0xBB67AE85))
    return c0, c1, c2, c3


@jit(inline=True)
def is_random(temperature):
    """Return whether a row is drawn, and not greedy. Twin: `tpsample.core.row_noise`."""
    return temperature >= F32(GREEDY_BELOW)


@jit(inline=True)
def safe_temperature(temperature):
    """Return the temperature of a row, 1 if it is greedy. Twin: `tpsample.core.row_noise`."""
    return smaller(temperature, F32(HOTTEST)) if is_random(temperature) else F32(1)


@jit(entry=True)
def safe_temperatures(temperature, out):
    """Find `safe_temperature` of rows, fp32 [R]."""
    for i in range(len(temperature)):
        out[i] = safe_temperature(temperature[i])


@jit(allocates=True)
def heated(temperature, index, y):
    """Return T · y of rows int64 [R] of a batch, float64 [R], or none if y has none."""
    out = np.empty(len(y), F64)
    for i in range(len(y)):
        out[i] = F64(safe_temperature(temperature[index[i]])) * y[i]
    return out


@jit(allocates=True)
def noise_of(draws, index):
    """Return the `Noise` of some rows, int64 [R]. Twin: `tpsample.core.row_noise.RowNoise`."""
    scale, random = np.empty(len(index), F32), np.empty(len(index), F32)
    streams = np.empty((len(index), draws.samples, 3), U32)
    for i in range(len(index)):
        row = index[i]
        temperature, key = draws.temperature[row], U64(draws.seed[row])
        scale[i], random[i] = F32(1), F32(0)
        if is_random(temperature):
            scale[i], random[i] = F32(LOG2_E / smaller(F64(temperature), HOTTEST)), F32(1)
        step, domain = U64(draws.position[row]), U32(draws.domain)
        for s in range(draws.samples):
            counter = U32(step), U32(step >> U64(32)), U32(draws.first_sample + s), domain
            r0, r1, r2, _ = philox(*counter, U32(key), U32(key >> U64(32)))
            streams[i, s, 0], streams[i, s, 1], streams[i, s, 2] = r0, r1, r2
    return Noise(scale, random, streams)


@jit(inline=True)
def stream_of(noise, i, s):
    """Return the noise of row i and sample s."""
    r0, r1, r2 = noise.streams[i, s]
    return Stream(noise.scale[i], noise.random[i], r0, r1, r2)


@jit(fastmath=FUSED)
def upper_scores(logits, block, stream, upper):
    """Bound the scores of a block's ids from above; return the largest, a NaN if there is one.

    Args:
        logits: fp32 [BLOCK], the logits or what bounds them from above.
        stream: of the row and the sample.
        upper: fp32 [BLOCK], out.
    """
    if stream.random == F32(0):
        for j in range(BLOCK):
            upper[j] = logits[j]
    else:
        r0, r1, r2, scale = stream.r0, stream.r1, stream.r2, stream.scale
        for q in range(BLOCK // 4):  # the words of the lanes
            w0, w1, w2, w3 = philox(U32((block.base >> 2) + q), r0, r1, r2, KEY_0, KEY_1)
            upper[4 * q], upper[4 * q + 1], upper[4 * q + 2], upper[4 * q + 3] = w0, w1, w2, w3
        for j in range(BLOCK):
            most = (NOISE_TOP + ROUNDING) - F32(bits_as(F32(upper[j]), I32)) * BITS_SCALE
            upper[j] = up(logits[j] * scale) + most
    leave_out(upper, block)
    # Integers, because a maximum of floats does not become vector code.
    top = I32(-(2**31))
    for j in range(BLOCK):
        top = larger(top, ordered(upper[j]))
    return of_ordered(top)


@jit()
def exact_noise(token_id, stream):
    """Return L of a token id, fp32, as `tpsample.noise.log2_exponential` has it."""
    r0, r1, r2 = stream
    words = philox(U32(token_id >> 2), r0, r1, r2, KEY_0, KEY_1)
    word = words[token_id & 3]
    low = F64((words[0] ^ words[1] ^ words[2] ^ words[3] ^ word) & U32(0xFFFF)) * LOW_SCALE
    u = F64(F32(F64(F32(word)) * U_SCALE + (low + LOW_HALF)))
    if u < 0.25:
        p = F64(F32(P4 * u + P3))
        p = F64(F32(p * u + P2))
        p = F64(F32(p * u + P1))
        p = F64(F32(p * u + P0))
        e = F64(F32(u * p))
    else:
        e = -F64(F32(math.log2(F64(F32(1.0 - u)))))
    return F32(math.log2(e))


@jit()
def exact_score(logit, token_id, stream):
    """Return the score of a logit, fp32, as `tpsample.core.score.score` has it."""
    product = F64(logit) * F64(stream.scale)
    if stream.random == F32(0):
        return F32(product)
    words = stream.r0, stream.r1, stream.r2
    return F32(product - F64(exact_noise(I64(token_id), words)))
