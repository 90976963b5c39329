"""The passes of a verification by ratio, position by position, and the arithmetic between them.

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
from tpsample.backends.numba_.kernels.decode import NAN, OK, token_of
from tpsample.backends.numba_.kernels.inputs import BLOCK, aligned_block, lanes_of
from tpsample.backends.numba_.kernels.masses import mass_row, weigh_block
from tpsample.backends.numba_.kernels.noise import (
    BITS_SCALE,
    Stream,
    exact_noise,
    is_random,
    philox,
    upper_scores,
)
from tpsample.backends.numba_.kernels.numbers import (
    key_of,
    lanes_reaching,
    lowest_lane,
    pack,
    value_of,
)
from tpsample.backends.numba_.kernels.passes import words_of_block
from tpsample.backends.numba_.kernels.primitives import larger, smaller
from tpsample.core import acceptance, residual
from tpsample.core.masses import TOP_MASS
from tpsample.core.word import KEY_NAN, LOWEST_DRAWABLE, NO_TOKEN

DOMAIN_RECOVERY, DOMAIN_ACCEPT = U32(acceptance.DOMAIN_RECOVERY), U32(acceptance.DOMAIN_ACCEPT)
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


@jit(entry=True)
def find_laws(gathered, given, temperature, drafts, status, top, draft_top, cut):
    """Find the numbers of both laws; twin: `Verification.laws`.

    Args:
        gathered: int64 [W, B, S or 2 S - 1], the first words of each rank.
        given: int64 [B, S], the drafts; temperature: fp32 [B · S], of the requests.
        drafts, status, top, draft_top, cut: [B, S], out, as in `Laws`; `status` are those of the
            rows before.
    """
    num_ranks, num_rows, num_words = gathered.shape
    width = given.shape[1]
    for row in range(num_rows):
        for i in range(width):
            word, draft_word = I64(0), I64(0)
            for rank in range(num_ranks):
                word = larger(word, gathered[rank, row, i])
                if width + i < num_words:
                    draft_word = larger(draft_word, gathered[rank, row, width + i])
            top[row, i], draft_top[row, i] = value_of(word), value_of(draft_word)
            certain = not is_random(temperature[row * width + i]) or top[row, i] == F32(np.inf)
            cut[row, i] = word if certain else I64(LOWEST_DRAWABLE)
            if key_of(draft_word) == KEY_NAN and given[row, i] >= 0 and status[row, i] == OK:
                status[row, i] = NAN
            drafts[row, i] = given[row, i] if status[row, i] == OK else I64(NO_TOKEN)


@jit()
def uniform(seed, position, i):
    """Return the uniform of a position; twin: `tpsample.core.acceptance.uniforms`."""
    key, step = U64(seed), U64(position + i)
    at = U32(step), U32(step >> U64(32)), U32(i), DOMAIN_ACCEPT
    high, low, _, _ = philox(*at, U32(key), U32(key >> U64(32)))
    bits = (I64(high) << I64(20)) | (I64(low) >> I64(12))
    return F64(2 * bits + 1) * 2.0**-53


@jit()
def share_weight(coefficient, total):
    """Return the weight by which masses become shares; twin: `tpsample.core.residual`."""
    if total < TOP_MASS:
        return I64(0)
    return I64(coefficient / F64(total) * 2.0 ** (residual.SHARE_BITS + residual.MASS_BITS))


@jit(entry=True, allocates=True)
def accept(drafts, sums, seed, position, block, index, weights, coefficient):
    """Leave out the drafts that their drafter excludes, and find the positions to look at.

    Args:
        drafts: int64 [B, S], changed in place.
        sums: int64 [2 or 4, B, S], those of `law_sums` over all ranks.
        seed, position: int64 [B].
        index, weights, coefficient: out, as in `Places`.
    """
    num_rows, width = drafts.shape
    certain = len(sums) == 2
    for row in range(num_rows):
        chain, stop = 1.0, -1
        for i in range(width):
            draft_mass = sums[3, row, i] if not certain else I64(0)
            draft_total = sums[2, row, i] if not certain else I64(0)
            if certain and drafts[row, i] >= 0:
                draft_mass = draft_total = I64(TOP_MASS)
            if draft_mass <= 0:
                drafts[row, i] = NO_TOKEN
            p = F64(sums[1, row, i]) / F64(larger(sums[0, row, i], I64(1)))
            q = F64(draft_mass) / F64(larger(draft_total, I64(1)))
            if block:
                index[row, i], coefficient[row, i] = i, chain
                weights[0, row, i] = share_weight(chain, sums[0, row, i])
                weights[1, row, i] = share_weight(1.0, draft_total)
                chain = smaller(chain * (p / q if q > 0.0 else 0.0), 1.0)
            elif stop < 0 and not (q > 0.0 and uniform(seed[row], position[row], i) * q < p):
                stop = i
                index[row, 0], coefficient[row, 0] = i, 1.0
                weights[0, row, 0] = share_weight(1.0, sums[0, row, i])
                weights[1, row, 0] = share_weight(1.0, draft_total)


@jit()
def accepted_of_block(status, coefficient, sums, seed, position):
    """Return how many drafts of a row are accepted; twin: `tpsample.core.acceptance.accept_block`.

    Args:
        status, coefficient: [S]; sums: int64 [S], of the residuals over all ranks.
    """
    accepted = 0
    for i in range(1, len(status)):
        # A position without a law has no draft, so c alone enters its test.
        c = coefficient[i]
        left = F64(sums[i]) * 2.0**-residual.SHARE_BITS if status[i] == OK else c
        if uniform(seed, position, i - 1) * (left + 1.0 - c) < left:
            accepted = i
    return accepted


@jit(entry=True, allocates=True)
def emit(gathered, laws, sampled, places, seed, position, token_ids, accepted, row_status):
    """Find what rows emit; twin: `Verification.output`.

    Args:
        gathered: int64 [W, 1 or 2, B, N], the `residuals` of all ranks; 2 for a block.
        laws: drafts and status, [B, S] each; sampled: int64 [B, S].
        places: int64 and float64 [B, N], index and coefficient.
        token_ids: int64 [B, S], out; accepted, row_status: [B], out; see `VerifyOutput`.
    """
    (drafts, status), (index, coefficient) = laws, places
    num_rows, width = drafts.shape
    sums = np.empty(width, I64)
    for row in range(num_rows):
        column, stop = 0, index[row, 0]
        if gathered.shape[1] == 2:
            for i in range(width):
                sums[i] = 0
                for rank in range(len(gathered)):
                    sums[i] += gathered[rank, 1, row, i]
            stop = accepted_of_block(status[row], coefficient[row], sums, seed[row], position[row])
            column = stop
        word = I64(0)
        for rank in range(len(gathered)):
            word = larger(word, gathered[rank, 0, row, column])
        good = status[row, stop] == OK and sampled[row, stop] >= 0
        for i in range(width):
            token_ids[row, i] = drafts[row, i] if i < stop else I64(NO_TOKEN)
        if good:
            token_ids[row, stop] = token_of(word)[0]
        accepted[row], row_status[row] = stop, status[row, stop]
