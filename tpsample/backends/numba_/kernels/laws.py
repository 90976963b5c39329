"""The passes of a verification by ratio, position by position.

Twin: `tpsample.backends.torch_.verification`, and `tpsample.core.residual` for the arithmetic.

A score of a draw from a residual has a logarithm, which is computed only of the ids that can win.
The bits of the number of a token bound its logarithm from above, as those of a word bound the noise
(`tpsample.backends.numba_.kernels.noise`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpsample.backends.numba_.kernels.compiling import F32, F64, I32, I64, U32, U64, jit
from tpsample.backends.numba_.kernels.inputs import BLOCK, aligned_block, lanes_of
from tpsample.backends.numba_.kernels.masses import mass_row, weigh_block
from tpsample.backends.numba_.kernels.noise import (
    BITS_SCALE,
    Stream,
    exact_noise,
    philox,
    upper_scores,
)
from tpsample.backends.numba_.kernels.numbers import (
    lanes_reaching,
    lowest_lane,
    pack,
    value_of,
)
from tpsample.backends.numba_.kernels.passes import words_of_block
from tpsample.backends.numba_.kernels.primitives import larger
from tpsample.core import acceptance, residual
from tpsample.core.masses import TOP_MASS
from tpsample.core.word import LOWEST_DRAWABLE

DOMAIN_RECOVERY = U32(acceptance.DOMAIN_RECOVERY)
LIMB, LIMB_MASK = I64(residual.LIMB), I64(2**residual.LIMB - 1)
REST = I64(residual.MASS_BITS - residual.LIMB)
SHARE_SHIFT, PLAIN_SHIFT = I32(-residual.SHARE_BITS), I32(residual.PLAIN_SHIFT)
ABOVE = F32(0.0872 - 127.0)
"""log2 x <= bits(x) 2^-23 + ABOVE: the line between powers of two is at most 0.0861 below."""


class NativeLaws(NamedTuple):
    """The laws of R = B · S positions on this rank.

    Attributes:
        target: fp32 [R, V_local].
        draft: fp32 [B · K, V_local]; no rows if the drafts were certain.
        certain: whether they were.
        first_id: global id of the first column.
        num_positions: S = K + 1.
        temperature, top, draft_top: fp32 [R].
        cut, drafts: int64 [R].
    """

    target: np.ndarray
    draft: np.ndarray
    certain: bool
    first_id: int
    num_positions: int
    temperature: np.ndarray
    top: np.ndarray
    draft_top: np.ndarray
    cut: np.ndarray
    drafts: np.ndarray


@jit()
def target_masses(logits, first_id, row, cut, words, power, mass):
    """Find P of up to BLOCK neighbouring ids; return whether any can have one."""
    count = len(logits)
    if cut > I64(LOWEST_DRAWABLE):
        if words_of_block(logits, first_id, words) < cut:
            return False
        weigh_block(logits, row, power, mass)
        for j in range(count):
            mass[j] = mass[j] if words[j] >= cut else I64(0)
        return True
    weigh_block(logits, row, power, mass)
    for j in range(count):
        mass[j] = I64(0) if logits[j] == F32(-np.inf) else mass[j]
    return True


@jit()
def draft_masses(laws, law, column, count, row, power, mass):
    """Find Q of `count` neighbouring columns of a position; 0 without a draft."""
    draft = laws.drafts[law]
    if draft < 0 or laws.certain:
        for j in range(count):
            mass[j] = I64(0)
        own = draft - laws.first_id - column
        if draft >= 0 and 0 <= own < count:
            mass[own] = I64(TOP_MASS)
        return
    logits = laws.draft[law - law // laws.num_positions][column : column + count]
    weigh_block(logits, row, power, mass)
    for j in range(count):
        mass[j] = mass[j] if logits[j] > F32(-np.inf) else I64(0)


@jit(in_parts=True, allocates=True)
def law_sums(start, stop, part, arguments):
    """Sum both laws at some positions.

    Args:
        sums: int64 [2 or 4, R], zeros: Z_P and P of the draft, then Z_Q and Q of it.
    """
    laws, sums = arguments
    num_ids = laws.target.shape[1]
    power, mass, words = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    for law in range(start, stop):
        temperature, draft = laws.temperature[law], laws.drafts[law]
        row = mass_row(laws.top[law], temperature)
        draft_row = mass_row(laws.draft_top[law], temperature)
        total, draft_total, logits = I64(0), I64(0), laws.target[law]
        for base in range(0, num_ids, BLOCK):
            piece, own = logits[base : base + BLOCK], draft - laws.first_id - base
            count = len(piece)
            is_own = draft >= 0 and 0 <= own < count
            if target_masses(piece, laws.first_id + base, row, laws.cut[law], words, power, mass):
                for j in range(count):
                    total += mass[j]
                sums[1, law] += mass[own] if is_own else I64(0)
            if draft >= 0 and not laws.certain:
                draft_masses(laws, law, base, count, draft_row, power, mass)
                for j in range(count):
                    draft_total += mass[j]
                sums[3, law] += mass[own] if is_own else I64(0)
        sums[0, law] = total
        if not laws.certain:
            sums[2, law] = draft_total


@jit(inline=True)
def share_of(mass, high, middle, low):
    """Return floor(mass · weight / 2^40) of a weight in parts of LIMB bits."""
    rest = mass * middle + (mass * low >> LIMB)
    return (mass * high << I64(2)) + (rest >> REST)


@jit()
def limbs_of(weight):
    """Return the parts of a weight."""
    return weight >> (LIMB + LIMB), (weight >> LIMB) & LIMB_MASK, weight & LIMB_MASK


@jit()
def subtract(target, weight, draft, draft_weight, left):
    """Find the residuals of some ids; return their sum."""
    high, middle, low = limbs_of(weight)
    draft_high, draft_middle, draft_low = limbs_of(draft_weight)
    total = I64(0)
    for j in range(len(left)):
        share = share_of(target[j], high, middle, low)
        share -= share_of(draft[j], draft_high, draft_middle, draft_low)
        left[j] = larger(share, I64(0))
        total += left[j]
    return total


@jit()
def upper_logarithms(left, target, ends):
    """Bound the logarithms of the numbers of some ids from above, with their shifts."""
    for j in range(len(ends)):
        number = F32(left[j] if left[j] > 0 else target[j])
        shift = SHARE_SHIFT if left[j] > 0 else PLAIN_SHIFT
        end = F32(number.view(I32)) * BITS_SCALE + (F32(shift) + ABOVE)
        ends[j] = end if number > F32(0) else F32(-np.inf)


@jit()
def recovery_score(left, target, noise):
    """Return the score of an id with a mass; twin: `tpsample.core.residual.recovery_scores`."""
    number = F32(left if left > 0 else target)
    bits = number.view(I32)
    shift = SHARE_SHIFT if left > 0 else PLAIN_SHIFT
    mantissa = I32((bits & I32(0x7FFFFF)) | I32(0x3F800000)).view(F32)
    exponent = F32(shift + (bits >> I32(23)) - I32(127))
    return F32(exponent + F32(F32(math.log2(F64(mantissa))) - noise))


@jit(in_parts=True, allocates=True)
def residuals(start, stop, part, arguments):
    """Find the best word of a draw from the residual of some positions, and its sum.

    Args:
        index: int64 [B, N], the positions; weights: int64 [2, B, N].
        seed, position: int64 [B].
        out: int64 [2, B, N], zeros: the words, and the sums.
    """
    laws, index, weights, seed, position, out = arguments
    num_ids, num_columns = laws.target.shape[1], index.shape[1]
    first = laws.first_id & 3
    power, mass, words = np.empty(BLOCK, F32), np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    draft, left = np.empty(BLOCK, I64), np.empty(BLOCK, I64)
    ends, upper = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
    for at in range(start, stop):
        row, n = at // num_columns, at % num_columns
        i = index[row, n]
        law = row * laws.num_positions + i
        temperature, logits = laws.temperature[law], laws.target[law]
        mass_numbers = mass_row(laws.top[law], temperature)
        draft_mass_numbers = mass_row(laws.draft_top[law], temperature)
        weight, draft_weight = weights[0, row, n], weights[1, row, n]
        key, step = U64(seed[row]), U64(position[row] + i)
        r0, r1, r2, _ = philox(
            U32(step), U32(step >> U64(32)), U32(i), DOMAIN_RECOVERY, U32(key), U32(key >> U64(32))
        )
        stream = Stream(F32(1), F32(1), r0, r1, r2)
        best, total = I64(0), I64(0)
        for column in range(-first, num_ids, BLOCK):
            block = aligned_block(laws.first_id, column, num_ids)
            base, lane, count = block.local, block.lane, block.count
            piece = logits[base : base + count]
            if not target_masses(
                piece, laws.first_id + base, mass_numbers, laws.cut[law], words, power, mass
            ):
                continue
            draft_masses(laws, law, base, count, draft_mass_numbers, power, draft)
            total += subtract(mass, weight, draft, draft_weight, left[:count])
            upper_logarithms(left, mass, ends[lane : lane + count])
            upper_scores(ends, block, stream, upper)
            lanes = lanes_reaching(upper, value_of(best), lanes_of(block))
            while lanes:
                j = lowest_lane(lanes)
                lanes &= lanes - U64(1)
                if upper[j] < value_of(best):
                    continue
                token_id = block.base + j
                noise = exact_noise(I64(token_id), (r0, r1, r2))
                score = recovery_score(left[j - lane], mass[j - lane], noise)
                best = larger(best, pack(score, token_id))
        out[0, row, n], out[1, row, n] = best, total
