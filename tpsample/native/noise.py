"""Noise: bounded for 64 neighbouring ids at a time, exact for single ids. Twin: `tpsample.noise`.

With f = fp32(w) of an id's word w, the definition has

    u >= f 2^-32 (1 − 2^-23)                 `low` is positive, and rounding is monotone
    e >= u log2 e (1 − 2e-6)                 −log2(1 − u) >= u log2 e; 2e-6 covers the polynomial
    −L <= 32 − log2 f − log2 log2 e + 1e-5   and the roundings of e and of L

and for a normal fp32 number f >= 1 its bits, read as an integer, bound the logarithm, because log2
is concave and so lies above the line through neighbouring powers of two:

    log2 f >= bits(f) 2^-23 − 127            at most 0.087 below; equal at powers of two

    −L <= NOISE_TOP − bits(f) 2^-23

f = 0 has bits 0, and the bound is then 158.5, more than any noise (48.5). No logarithm is computed,
so nothing depends on the accuracy of a library.
"""

from __future__ import annotations

import math

import numpy as np

from tpsample import noise
from tpsample.core.row_noise import GREEDY_BELOW, LOG2_E
from tpsample.native.compiling import FUSED, jit
from tpsample.native.numbers import F32, F64, I32, I64, U32, U64

BLOCK = 64
"""Neighbouring ids whose noise is made at once."""

NOISE_TOP = F32(np.nextafter(F32(159.0 - math.log2(math.log2(math.e)) + 1e-5), F32(np.inf)))
BITS_SCALE = F32(2.0**-23)

KEY_0, KEY_1 = (U32(key) for key in noise.ELEMENT_KEY)
DOMAIN = U32(noise.DOMAIN_TOKEN)
U_SCALE, LOW_SCALE, LOW_HALF = noise.U_SCALE, noise.LOW_SCALE, noise.LOW_HALF
P0, P1, P2, P3, P4 = noise.POLYNOMIAL


@jit()
def philox(c0, c1, c2, c3, k0, k1, rounds):  # type: ignore[no-untyped-def]
    """Return the four words of Philox4x32."""
    for _ in range(rounds):
        p0, p1 = U64(c0) * U64(0xD2511F53), U64(c2) * U64(0xCD9E8D57)
        c0, c1 = U32(U32(p1 >> U64(32)) ^ c1 ^ k0), U32(p1)
        c2, c3 = U32(U32(p0 >> U64(32)) ^ c3 ^ k1), U32(p0)
        k0, k1 = U32(k0 + U32(0x9E3779B9)), U32(k1 + U32(0xBB67AE85))
    return c0, c1, c2, c3


@jit(entry=True)
def row_noise(temperature, seed, position, rows, samples, scale, random, streams):  # type: ignore[no-untyped-def]
    """Find what the scores of some rows need. Twin: `tpsample.core.row_noise.RowNoise`.

    Args:
        temperature: fp32 [B].
        seed, position: int64 [B].
        rows: int64 [R], of the batch.
        samples: draws per row.
        scale: fp32 [≥ R], out: log2 e / T, 1 in a greedy row.
        random: fp32 [≥ R], out: 1, or 0 in a greedy row.
        streams: uint32 [≥ samples, ≥ R, 3], out.
    """
    for i in range(len(rows)):
        row = rows[i]
        heat = temperature[row]
        is_random = heat >= F32(GREEDY_BELOW)
        scale[i] = F32(LOG2_E / F64(heat)) if is_random else F32(1)
        random[i] = F32(1) if is_random else F32(0)
        key, place = U64(seed[row]), U64(position[row])
        for sample in range(samples):
            r = philox(
                U32(place), U32(place >> U64(32)), U32(sample), DOMAIN,
                U32(key), U32(key >> U64(32)), 10,
            )  # fmt: skip
            streams[sample, i, 0], streams[sample, i, 1], streams[sample, i, 2] = r[0], r[1], r[2]


@jit(fastmath=FUSED)
def upper_scores(  # type: ignore[no-untyped-def]
    logits, errors, gain, extra, scale, random, stream, first_quad, rounds, words, upper
):
    """Bound the scores of BLOCK ids from above; return the largest bound.

    Args:
        logits, errors: fp32 [BLOCK]: a score is off by at most gain · error + extra (fp32), which
            has to be proved.
        scale, random: of the row, as `row_noise` has them.
        stream: uint32 [3], of the row.
        first_quad: the quad of the first id.
        words: uint32 [4, BLOCK / 4], scratch.
        upper: fp32 [BLOCK], out.
    """
    best = F32(-np.inf)
    if random == F32(0):
        for j in range(BLOCK):
            upper[j] = logits[j] + (gain * errors[j] + extra)
    else:
        r0, r1, r2 = stream[0], stream[1], stream[2]
        for q in range(BLOCK // 4):
            words[0, q], words[1, q], words[2, q], words[3, q] = philox(
                U32(first_quad + q), r0, r1, r2, KEY_0, KEY_1, rounds
            )
        for q in range(BLOCK // 4):
            for k in range(4):
                j = 4 * q + k
                bits = F32(F32(words[k, q]).view(I32))
                slack = gain * errors[j] + (extra + NOISE_TOP)
                upper[j] = logits[j] * scale - bits * BITS_SCALE + slack
    for j in range(BLOCK):
        best = max(best, upper[j])
    return best


@jit()
def exact_noise(token_id, stream, rounds):  # type: ignore[no-untyped-def]
    """Return L of a token id, fp32, as `tpsample.noise.log2_exponential` has it."""
    words = philox(U32(token_id >> 2), stream[0], stream[1], stream[2], KEY_0, KEY_1, rounds)
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
def exact_score(logit, token_id, scale, random, stream, rounds):  # type: ignore[no-untyped-def]
    """Return the score of a logit, fp32, as `tpsample.core.score.score_values` has it."""
    product = F64(logit) * F64(scale)
    if random == F32(0):
        return F32(product)
    return F32(product - F64(exact_noise(I64(token_id), stream, rounds)))
